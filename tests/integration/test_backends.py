"""Targets whose model runs in an engine's server: the same text and the same distribution as from our own engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from specdec.contract.constraint import Constraint
from specdec.contract.errors import Internal, StaleEpoch, Unavailable, Unsupported
from specdec.contract.tenant import session_on_replica
from specdec.contract.types import DrawRule, SamplingFilters, SessionPosition, VerifyRequest
from specdec.v1 import coordinator_pb2 as pb
from tests.support.backend_rig import (
    BackendSystem,
    backend_system,
    start_backend,
    table_model,
    write_checkpoint,
)
from tests.support.coordinator_rig import PROMPT, Rig, request
from tests.support.engine_server import EngineOptions, EngineServer
from tests.support.table_services import EOS, VOCABULARY

BACKENDS = ("server", "vllm")
MODES = (pb.SPECULATION_MODE_REJECTION, pb.SPECULATION_MODE_BLOCK, pb.SPECULATION_MODE_COUPLED)


@pytest.fixture(params=BACKENDS)
async def system(request: pytest.FixtureRequest) -> AsyncIterator[BackendSystem]:
    async with backend_system(request.param) as system:
        yield system


@pytest.fixture
async def vllm() -> AsyncIterator[BackendSystem]:
    async with backend_system("vllm") as system:
        yield system


@pytest.fixture(params=BACKENDS[1:])
async def top_system(request: pytest.FixtureRequest) -> AsyncIterator[BackendSystem]:
    """A system whose target knows the likeliest tokens."""
    async with backend_system(request.param) as system:
        yield system


async def own_token_ids(*requests: pb.GenerateRequest) -> list[list[int]]:
    """Return the outputs of our own engine with the same model."""
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        return [(await coordinator.generate(each)).token_ids for each in requests]


def row_count(system: BackendSystem, outcome: str) -> float:
    labels = {"model_name": "table", "role": "target", "pool": "default", "outcome": outcome}
    value = system.target.metrics.registry.get_sample_value("specdec:backend_rows_total", labels)
    return value or 0.0


def verify_request(
    token_ids: Sequence[int], draft: Sequence[int], *, session_id: str = "s", epoch: int = 1, temperature: float = 0.0
) -> VerifyRequest:
    """Return a round of one whole session."""
    filters = SamplingFilters(temperature=temperature, top_k=5)
    position = SessionPosition(
        session_on_replica("default", session_id), epoch, 0, 0, b"", np.array(token_ids, dtype=np.uint32), filters,
        seed=3, turn=0, output_start=len(token_ids), draw_rule=DrawRule.DISTRIBUTION,
    )  # fmt: skip
    supports = [np.array([token_id], dtype=np.uint32) for token_id in draft] if temperature else []
    return VerifyRequest(position, np.array(draft, dtype=np.uint32), supports)


async def test_greedy_text_is_the_models_own_whatever_is_drafted(system: BackendSystem) -> None:
    for prompt, gamma in (([9], 0), ([9], 3), (list(range(2, 22)), 8)):
        output = await system.coordinator.generate(request(prompt, gamma=gamma))
        assert output.token_ids == table_model().greedy_continuation(prompt, 24)
    assert output.finished is not None
    stats = output.finished.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens  # both happened


async def test_coupled_text_is_that_of_our_own_engine_for_every_number_of_draft_tokens(
    top_system: BackendSystem,
) -> None:
    all_filters: list[dict[str, float]] = [{"top_k": 5}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.7}, {"min_p": 0.3}]
    gammas = (0, 3, 8)
    asked = [
        request(mode=pb.SPECULATION_MODE_COUPLED, gamma=gamma, temperature=0.9, seed=7, max_new_tokens=12, **filters)
        for filters in all_filters
        for gamma in gammas
    ]
    outputs = [(await top_system.coordinator.generate(each)).token_ids for each in asked]
    assert outputs == await own_token_ids(*asked)
    for index, filters in enumerate(all_filters):
        assert len(set(map(tuple, outputs[index * len(gammas) :][: len(gammas)]))) == 1, filters


async def test_sampled_text_is_that_of_our_own_engine_where_the_top_tokens_decide(top_system: BackendSystem) -> None:
    """A law that is stated exactly gives the same draws as the whole distribution."""
    asked = [
        request(mode=mode, gamma=3, temperature=0.9, top_k=8, seed=seed) for mode in MODES[:2] for seed in range(3)
    ]
    outputs = [(await top_system.coordinator.generate(each)).token_ids for each in asked]
    assert outputs == await own_token_ids(*asked)
    # Only rows that a text of another seed has cached are asked for again.
    assert row_count(top_system, "reasked") == row_count(top_system, "lost")


async def test_a_seed_gives_the_same_sampled_text_again(system: BackendSystem) -> None:
    """The engine samples each position here, with a seed that follows from the position."""
    for mode in MODES:
        asked = request(mode=mode, gamma=3, temperature=1.0, seed=11, max_new_tokens=12)
        first, second = [(await system.coordinator.generate(asked)).token_ids for _ in range(2)]
        assert first == second, mode


async def test_end_tokens_are_masked_until_the_output_is_long_enough(system: BackendSystem) -> None:
    """The prompt is one after which the model's third greedy token is its end token."""
    model = table_model()
    prompt = next(
        [a, b] for a, b in itertools.product(range(2, VOCABULARY), repeat=2)
        if EOS in model.greedy_continuation([a, b], 3)
    )  # fmt: skip
    asked = request(prompt, ignore_eos=False, min_new_tokens=6)
    (expected,) = await own_token_ids(asked)
    assert len(expected) >= 6
    assert (await system.coordinator.generate(asked)).token_ids == expected


async def test_a_repeated_round_asks_again_for_the_rows_that_came_from_the_cache(vllm: BackendSystem) -> None:
    """The server's rows of cached positions hold those of another text of the same length."""
    tokens, draft = [5, 6, 7, 8, 9, 10], [3, 4, 5, 6, 7]
    first = await vllm.target.engine.verify(verify_request(tokens, draft, temperature=0.9))
    assert row_count(vllm, "lost") == 0
    await vllm.target.engine.verify(verify_request([9] * 6, draft, session_id="other", temperature=0.9))
    second = await vllm.target.engine.verify(verify_request(tokens, draft, epoch=2, temperature=0.9))
    assert row_count(vllm, "lost") > 0
    for row, again in zip(first.rows, second.rows, strict=True):
        np.testing.assert_array_equal(row.weights, again.weights)
        assert row.tail_token_id == again.tail_token_id


async def test_a_long_prompt_is_asked_for_row_by_row(vllm: BackendSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("target_service.backends.vllm_backend._MAX_ENTRIES", 16)
    prompt = list(range(2, 22))
    output = await vllm.coordinator.generate(request(prompt))
    assert output.token_ids == table_model().greedy_continuation(prompt, 24)
    rounds = [each["sampling_params"] for each in vllm.server.asked.generations[-8:]]
    assert not any("prompt_logprobs" in params for params in rounds)


async def test_logprobs_are_those_of_our_own_engine(top_system: BackendSystem) -> None:
    asked = request(logprobs=3, provenance=True)
    async with Rig() as rig:
        expected = await (await rig.coordinator()).generate(asked)
    output = await top_system.coordinator.generate(asked)
    for detail, own in zip(output.details, expected.details, strict=True):
        assert detail.logprob == pytest.approx(own.logprob, abs=1e-4)
        assert [top.token_id for top in detail.top_logprobs] == [top.token_id for top in own.top_logprobs]


async def test_a_field_that_the_backend_cannot_serve_exactly_is_refused_by_name_at_once(system: BackendSystem) -> None:
    num_asked = len(system.server.asked.completions) + len(system.server.asked.generations)
    fields: dict[str, object] = {
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {3: 1.0}
    }  # fmt: skip
    for field, value in fields.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await system.coordinator.generate(request(session_id="refused", **{field: value}))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        told = f"sampling.{field} cannot be served exactly by a target with the backend"
        assert told in (caught.value.details() or "")
    with pytest.raises(grpc.aio.AioRpcError, match="constraint cannot be followed by the connected targets"):
        await system.coordinator.generate(request(session_id="refused", constraint=Constraint.json_object()))
    asked = verify_request([5, 6, 7], [])
    asked = replace(asked, position=replace(asked.position, filters=SamplingFilters(constraint_id=bytes(16))))
    with pytest.raises(Unsupported, match="cannot follow constraints"):
        await system.target.engine.verify(asked)
    assert len(system.server.asked.completions) + len(system.server.asked.generations) == num_asked
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await system.coordinator.stub.GetSession(pb.GetSessionRequest(session_id="refused"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_tenants_have_prefix_caches_of_their_own(vllm: BackendSystem) -> None:
    for tenant in ("default", "acme", "umbrella"):
        asked = verify_request([5, 6, 7], [3], session_id=tenant)
        asked.position.tenant = tenant
        await vllm.target.engine.verify(asked)
    salts = [each.get("cache_salt") for each in vllm.server.asked.generations[-3:]]
    assert salts == [None, "specdec tenant acme", "specdec tenant umbrella"]


async def test_after_a_restart_of_the_server_with_its_model_the_replica_goes_on(system: BackendSystem) -> None:
    port, server = system.server.port, system.server
    await server.stop()
    with pytest.raises(Unavailable):
        await system.target.engine.verify(verify_request([5, 6], [3]))
    async with EngineServer(table_model(), port=port):
        output = await system.coordinator.generate(request())
        assert output.token_ids == table_model().greedy_continuation(PROMPT, 24)


async def test_after_a_restart_of_the_server_with_another_model_no_token_of_it_is_taken(system: BackendSystem) -> None:
    port = system.server.port
    ended = asyncio.create_task(system.target.engine.wait_ended())
    await system.server.stop()
    async with EngineServer(table_model(salt=5), port=port):
        with pytest.raises(Internal, match="serves another model now"):
            await system.target.engine.verify(verify_request([5, 6], [3]))
        with pytest.raises(Internal, match="serves another model now"):  # the process ends
            await ended


async def test_a_server_that_does_not_answer_fails_the_round_in_time(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    async with EngineServer(table_model()) as server:
        target = await start_backend(server.url, tmp_path, "vllm", backend_timeout_s=3.0)
        server.gate.clear()
        with pytest.raises(Unavailable, match="did not answer in time"):
            await target.engine.verify(verify_request([5, 6], [3]))
        server.gate.set()
        await target.engine.verify(verify_request([5, 6], [3]))
        await target.kill()


async def test_a_round_goes_on_while_one_of_its_callers_remains_and_ends_with_the_last(vllm: BackendSystem) -> None:
    engine, server = vllm.target.engine, vllm.server
    server.gate.clear()
    asked = verify_request([5, 6, 7], [3])
    callers = [asyncio.create_task(engine.verify(asked)) for _ in range(2)]
    await asyncio.sleep(0)
    callers[0].cancel()
    server.gate.set()
    answer = await callers[1]
    assert answer.choice_token_ids[0] == table_model().greedy_continuation([5, 6, 7], 1)[0]

    server.gate.clear()
    alone = asyncio.create_task(engine.verify(verify_request([5, 6], [3], session_id="alone")))
    await asyncio.sleep(0)
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    assert engine.stats().num_running_calls == 0
    server.gate.set()


async def test_a_newer_round_takes_the_place_of_one_that_the_server_has_not_answered(vllm: BackendSystem) -> None:
    engine, server = vllm.target.engine, vllm.server
    server.gate.clear()
    older = asyncio.create_task(engine.verify(verify_request([5, 6, 7], [3])))
    await asyncio.sleep(0)
    newer = asyncio.create_task(engine.verify(verify_request([5, 6, 8], [4], epoch=2)))
    with pytest.raises(StaleEpoch):
        await older
    server.gate.set()
    assert (await newer).choice_token_ids[0] == table_model().greedy_continuation([5, 6, 8], 1)[0]
    engine.check_integrity()


async def test_a_status_that_says_nothing_about_the_request_makes_the_replica_unavailable_for_it(
    system: BackendSystem,
) -> None:
    """The coordinator asks again, so the client sees the whole text and nothing of the server's message."""
    await system.target.engine.verify(verify_request([5, 6], [3], session_id="first"))
    for status in (401, 408, 429, 503):
        asked = verify_request([5, 6], [3], session_id=str(status))
        system.server.refuse_next = status
        with pytest.raises(Unavailable) as caught:
            await system.target.engine.verify(asked)
        assert "sk-secret" not in caught.value.message
        answer = await system.target.engine.verify(asked)
        assert answer.choice_token_ids[0] == table_model().greedy_continuation([5, 6], 1)[0]


async def test_a_refused_round_names_no_detail_of_the_server(system: BackendSystem) -> None:
    system.server.refuse_next = 400
    with pytest.raises(Internal) as caught:
        await system.target.engine.verify(verify_request([5, 6], []))
    assert caught.value.message.startswith("the engine refused a ")
    assert "sk-secret" not in caught.value.message


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_server_that_knows_the_model_by_another_name_after_its_restart_ends_the_replica(backend: str) -> None:
    async with backend_system(backend) as system:
        port = system.server.port
        await system.server.stop()
        async with EngineServer(table_model(), EngineOptions(name="renamed"), port=port):
            with pytest.raises(Internal, match="serves another model now"):
                await system.target.engine.verify(verify_request([5, 6], [3]))


async def test_one_identification_serves_all_rounds_that_arrived_before_it(vllm: BackendSystem) -> None:
    rounds = [verify_request([5, 6, 7], [3], session_id=f"s{number}") for number in range(16)]
    before = len(vllm.server.asked.generations)
    await asyncio.gather(*(vllm.target.engine.verify(asked) for asked in rounds))
    num_probes = len(vllm.server.asked.generations) - before - len(rounds)
    assert num_probes <= 3 * 4  # of 4 prompts each; an identification for each connection would be 64


async def test_a_round_whose_cached_rows_json_cannot_state_is_asked_for_row_by_row() -> None:
    async with backend_system("vllm", EngineOptions(has_nan_in_memory=True)) as system:
        prompt = list(range(2, 22))
        for _ in range(2):
            output = await system.coordinator.generate(request(prompt))
            assert output.token_ids == table_model().greedy_continuation(prompt, 24)
        assert row_count(system, "reasked") > 0
