"""One coordinator over real gRPC and real engines on table models: streams, turns, ends, joins, statistics."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from specdec.contract.tenant import DEFAULT_TENANT, SessionKey
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Rig, eventually, request, started_coordinator
from tests.support.output import Output, read_rest, read_until
from tests.support.table_services import EOS, text_of
from tests.support.table_worker import held_steps_are_no_hangs

__all__ = ["held_steps_are_no_hangs"]

MODES = {
    "off": pb.SPECULATION_MODE_OFF,
    "rejection": pb.SPECULATION_MODE_REJECTION,
    "block": pb.SPECULATION_MODE_BLOCK,
    "coupled": pb.SPECULATION_MODE_COUPLED,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("gamma", [0, 1, 4, 8, None])
async def test_greedy_output_equals_the_targets_output_in_every_mode_and_at_every_gamma(
    mode: int, gamma: int | None
) -> None:
    async with started_coordinator() as (rig, coordinator):
        output = await coordinator.generate(request(mode=mode, gamma=gamma, max_new_tokens=40))
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 40)
        assert output.finished is not None
        assert output.finished.reason == pb.FINISH_REASON_LENGTH
        assert output.text == text_of(output.token_ids)


async def test_a_stream_sends_started_then_chunks_with_rising_indexes_then_finished() -> None:
    async with started_coordinator() as (_, coordinator):
        output = await coordinator.generate(request(seed=9))
        assert output.started is not None
        assert output.started.num_prompt_tokens == len(PROMPT)
        assert output.started.seed == 9
        assert output.started.session_id
        assert output.started.request_id
        position = 0
        for chunk in output.chunks:
            assert chunk.index == position
            position += len(chunk.token_ids)
        assert position == 24


async def test_statistics_add_up_and_drafts_are_really_accepted_and_rejected() -> None:
    async with started_coordinator() as (_, coordinator):
        output = await coordinator.generate(request(provenance=True, max_new_tokens=60))
        assert output.finished is not None
        stats, usage = output.finished.stats, output.finished.usage
        sources = [detail.source for detail in output.details]
        assert stats.num_accepted_tokens == sources.count(pb.TOKEN_SOURCE_ACCEPTED) == sum(stats.accepted_per_position)
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert sum(chunk.num_draft_tokens for chunk in output.chunks) == stats.num_draft_tokens
        assert stats.num_rounds == len(output.chunks)
        assert stats.num_target_only_steps == sources.count(pb.TOKEN_SOURCE_TARGET)
        assert usage.num_output_tokens == 60
        assert usage.num_prompt_tokens == len(PROMPT)
        assert 0 < stats.ttft_s <= stats.e2el_s
        # Each round sent its tokens of four bytes to the draft and to the target, within larger messages.
        assert stats.wire_bytes > 8 * usage.num_output_tokens


@pytest.mark.parametrize("held", ["draft", "target"])
async def test_the_waits_for_draft_and_target_are_counted_separately(held: str) -> None:
    async with started_coordinator() as (rig, coordinator):
        worker = (rig.draft if held == "draft" else rig.target).worker
        worker.gate.clear()
        generation = asyncio.ensure_future(coordinator.generate(request(max_new_tokens=12)))
        await eventually(lambda: worker.entered.acquire(blocking=False))
        await asyncio.sleep(0.4)
        worker.gate.set()
        stats = (await generation).finished.stats
        waits = {"draft": stats.draft_s, "target": stats.verify_s}
        assert waits.pop(held) >= 0.4
        assert 0 < waits.popitem()[1] <= stats.e2el_s - 0.4
        assert stats.draft_s + stats.verify_s <= stats.e2el_s


async def test_a_request_without_drafts_has_no_draft_wait() -> None:
    async with started_coordinator() as (_, coordinator):
        output = await coordinator.generate(request(mode=pb.SPECULATION_MODE_OFF))
        assert output.finished is not None
        assert output.finished.stats.draft_s == 0.0
        assert 0 < output.finished.stats.verify_s <= output.finished.stats.e2el_s


async def test_eos_ends_the_output_and_stays_in_it_without_text() -> None:
    async with started_coordinator() as (_, coordinator):
        output = await coordinator.generate(request(ignore_eos=False, logit_bias={EOS: 4.0}, max_new_tokens=200))
        assert output.finished is not None
        assert output.finished.reason == pb.FINISH_REASON_STOP
        assert output.token_ids.index(EOS) == len(output.token_ids) - 1
        session = await coordinator.stub.GetSession(
            pb.GetSessionRequest(session_id=output.started.session_id, include_token_ids=True)
        )
        assert list(session.token_ids) == [*PROMPT, *output.token_ids]
        assert session.status == "idle"


async def test_min_new_tokens_delays_eos() -> None:
    async with started_coordinator() as (_, coordinator):
        output = await coordinator.generate(
            request(ignore_eos=False, logit_bias={EOS: 100.0}, min_new_tokens=7, max_new_tokens=20)
        )
        assert len(output.token_ids) == 8
        assert output.token_ids[-1] == EOS


async def test_a_stop_token_ends_the_output_and_is_counted() -> None:
    async with started_coordinator() as (rig, coordinator):
        greedy = rig.target.worker.greedy_continuation(PROMPT, 24)
        stop_id = greedy[9]
        output = await coordinator.generate(request(stop_token_ids=[stop_id]))
        assert output.token_ids == greedy[: greedy.index(stop_id) + 1]
        assert output.finished is not None
        assert output.finished.reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize("gamma", [0, 2, 8])
async def test_a_stop_string_across_tokens_cuts_text_and_later_tokens_are_never_committed(gamma: int) -> None:
    async with started_coordinator() as (rig, coordinator):
        greedy = rig.target.worker.greedy_continuation(PROMPT, 24)
        stop = text_of(greedy[10:13])
        output = await coordinator.generate(request(stop=[stop], gamma=gamma))
        assert output.text == text_of(greedy[:10])
        assert output.token_ids == greedy[:13]
        assert output.finished is not None
        assert output.finished.reason == pb.FINISH_REASON_STOP_STRING
        session = await coordinator.stub.GetSession(
            pb.GetSessionRequest(session_id=output.started.session_id, include_token_ids=True)
        )
        assert list(session.token_ids) == [*PROMPT, *greedy[:13]]


async def test_turns_append_to_the_session_and_reuse_cached_tokens() -> None:
    async with started_coordinator() as (rig, coordinator):
        first = await coordinator.generate(request(session_id="s", max_new_tokens=12))
        second = await coordinator.generate(request([9, 10, 11], session_id="s", max_new_tokens=12))
        history = [*PROMPT, *first.token_ids, 9, 10, 11]
        assert second.token_ids == rig.target.worker.greedy_continuation(history, 12)
        assert second.started.num_prompt_tokens == len(history)
        # Cached is all but the last output token, which has no KV, and the new prompt.
        assert second.finished.usage.num_cached_prompt_tokens == len(history) - 4
        session = await coordinator.stub.GetSession(pb.GetSessionRequest(session_id="s"))
        assert session.turn == 1


async def test_tokens_discarded_by_a_stop_in_mid_round_are_not_part_of_the_next_turn() -> None:
    async with started_coordinator(draft_salt=0) as (rig, coordinator):
        greedy = rig.target.worker.greedy_continuation(PROMPT, 24)
        await coordinator.generate(request(session_id="s", gamma=8, stop=[text_of(greedy[1:3])]))
        second = await coordinator.generate(request([9, 10], session_id="s", gamma=8))
        assert second.token_ids == rig.target.worker.greedy_continuation([*PROMPT, *greedy[:3], 9, 10], 24)


async def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    async with started_coordinator(draft_salt=0) as (_, coordinator):
        output = await coordinator.generate(request(gamma=4, max_new_tokens=60))
        stats = output.finished.stats
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


@pytest.mark.parametrize("mode", [pb.SPECULATION_MODE_OFF, pb.SPECULATION_MODE_COUPLED], ids=["off", "coupled"])
async def test_coupled_output_depends_only_on_the_seed(mode: int) -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        expected = await coordinator.generate(
            request(temperature=1.0, seed=7, gamma=2, mode=pb.SPECULATION_MODE_COUPLED, max_new_tokens=40)
        )
        for gamma in (0, 1, 8, None):
            again = await coordinator.generate(
                request(temperature=1.0, seed=7, gamma=gamma, mode=mode, max_new_tokens=40)
            )
            assert again.token_ids == expected.token_ids
        other = await coordinator.generate(request(temperature=1.0, seed=8, mode=mode, max_new_tokens=40))
        assert other.token_ids != expected.token_ids


async def test_a_seeded_output_is_the_same_alone_and_beside_other_sessions() -> None:
    async with started_coordinator() as (_, coordinator):
        requests = [
            request(
                [5 + index % 7] * (1 + index),
                temperature=0.5 + index / 16,
                seed=index,
                gamma=1 + index % 8,
                mode=list(MODES.values())[index % 4],
                max_new_tokens=10 + index,
            )
            for index in range(16)
        ]
        together = await asyncio.gather(*(coordinator.generate(one) for one in requests))
        for one, output in zip(requests, together, strict=True):
            assert (await coordinator.generate(one)).token_ids == output.token_ids


async def test_the_same_request_id_joins_the_running_request() -> None:
    async with started_coordinator() as (rig, coordinator):
        asked = request(session_id="s", request_id="r", gamma=2)
        stream = coordinator.stub.Generate(asked)
        begun = await read_until(stream, 1)
        rig.target.worker.gate.clear()
        try:
            joined = asyncio.create_task(coordinator.generate(asked))
            resumed = asyncio.create_task(
                coordinator.generate(request(None, session_id="s", resume_from=len(begun.token_ids)))
            )
            with pytest.raises(grpc.aio.AioRpcError) as busy:
                await coordinator.generate(request(session_id="s", request_id="other"))
        finally:
            rig.target.worker.gate.set()
        assert from_rpc_error(busy.value).reason == "SESSION_BUSY"
        await read_rest(stream, begun)
        assert (await joined).token_ids == begun.token_ids
        assert (await joined).text == begun.text
        rest = await resumed
        assert begun.token_ids[rest.chunks[0].index :] == rest.token_ids


async def test_a_finished_request_is_replayed_from_any_token_with_the_same_text() -> None:
    async with started_coordinator() as (_, coordinator):
        asked = request(session_id="s", request_id="r", max_new_tokens=12, gamma=2)
        first = await coordinator.generate(asked)
        again = await coordinator.generate(asked)
        assert (again.token_ids, again.text) == (first.token_ids, first.text)
        assert again.finished.usage == first.finished.usage
        assert again.finished.reason == first.finished.reason
        assert again.finished.stats.num_rounds == first.finished.stats.num_rounds
        texts = {chunk.index: "".join(c.text for c in first.chunks[n:]) for n, chunk in enumerate(first.chunks)}
        for index, text in texts.items():
            rest = await coordinator.generate(request(None, session_id="s", resume_from=index))
            assert (rest.token_ids, rest.text) == (first.token_ids[index:], text)


async def test_a_request_id_that_is_reused_for_another_request_is_refused() -> None:
    async with started_coordinator() as (_, coordinator):
        await coordinator.generate(request(session_id="s", request_id="r", max_new_tokens=4))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(request(session_id="s", request_id="r", max_new_tokens=5))
        error = from_rpc_error(caught.value)
        assert (error.reason, error.field) == ("INVALID_REQUEST", "request_id")


async def test_logprobs_are_those_of_the_model_before_filters() -> None:
    import numpy as np

    async with started_coordinator() as (rig, coordinator):
        for mode in MODES.values():
            output = await coordinator.generate(
                request(temperature=0.7, top_k=5, seed=3, mode=mode, logprobs=2, max_new_tokens=20)
            )
            tokens = list(PROMPT)
            for token_id, detail in zip(output.token_ids, output.details, strict=True):
                logits = rig.target.worker.logits_after(tokens).astype(np.float64)
                logprobs = logits - np.log(np.exp(logits).sum())
                assert detail.logprob == pytest.approx(logprobs[token_id], abs=1e-4)
                best = np.argsort(-logprobs)[:2]
                assert [top.token_id for top in detail.top_logprobs] == best.tolist()
                tokens.append(token_id)


async def test_a_resumed_request_still_sends_its_logprobs() -> None:
    async with started_coordinator() as (_, coordinator):
        stream = coordinator.stub.Generate(request(session_id="s", logprobs=1, max_new_tokens=100))
        held = await read_until(stream, 4)
        stream.cancel()
        rest = await coordinator.generate(request(None, session_id="s", resume_from=len(held.token_ids)))
        assert len(rest.details) == len(rest.token_ids)
        assert rest.details[-1].HasField("logprob")


async def test_provenance_names_source_probabilities_and_pool() -> None:
    async with started_coordinator() as (_, coordinator):
        output = await coordinator.generate(request(temperature=1.0, seed=5, provenance=True, max_new_tokens=60))
        assert len(output.details) == 60
        assert "".join(detail.text for detail in output.details) == output.text
        for detail in output.details:
            assert 0 < detail.p <= 1
            assert (detail.q > 0) == (detail.source == pb.TOKEN_SOURCE_ACCEPTED)
            drafted = detail.source in (pb.TOKEN_SOURCE_ACCEPTED, pb.TOKEN_SOURCE_CORRECTED)
            assert detail.draft_pool == ("default" if drafted else "")
        plain = await coordinator.generate(request(temperature=1.0, seed=5, max_new_tokens=60))
        assert not plain.details
        assert plain.token_ids == output.token_ids


async def test_deleting_a_session_frees_its_kv_everywhere_and_ends_its_request() -> None:
    async with started_coordinator() as (rig, coordinator):
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        await read_until(stream, 1)
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id="s"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_rest(stream, Output())
        assert from_rpc_error(caught.value).reason == "SESSION_NOT_FOUND"
        assert [service.engine.info().num_sessions for service in rig.services] == [0, 0]
        assert await rig.store.load("s") is None
        await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id="s"))


async def test_a_request_whose_session_is_deleted_before_its_first_step_fails_with_session_not_found() -> None:
    async with asyncio.timeout(60), started_coordinator() as (rig, coordinator):
        call = asyncio.create_task(coordinator.generate(request(session_id="s")))
        while not coordinator.generations.num_running:  # noqa: ASYNC110  the next step of the loop is too late
            await asyncio.sleep(0)
        await coordinator.generations.delete(SessionKey(DEFAULT_TENANT, "s"))
        await _check_gone(rig, call, "s")


async def test_a_session_deleted_during_the_admission_of_its_first_request_stays_deleted() -> None:
    async with asyncio.timeout(60), started_coordinator() as (rig, coordinator):
        for session_id in ("a", "b", "c", "d", "e"):
            call = asyncio.create_task(coordinator.generate(request(session_id=session_id, max_new_tokens=300)))
            while await rig.store.load(session_id) is None:
                pass
            await coordinator.generations.delete(SessionKey(DEFAULT_TENANT, session_id))
            await _check_gone(rig, call, session_id)


async def _check_gone(rig: Rig, call: asyncio.Task[Output], session_id: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert from_rpc_error(caught.value).reason == "SESSION_NOT_FOUND"
    assert await rig.store.load(session_id) is None


async def test_a_client_that_disconnects_cancels_its_generation_which_can_be_resumed() -> None:
    async with started_coordinator() as (rig, coordinator):
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=200))
        held = await read_until(stream, 5)
        stream.cancel()
        await eventually(lambda: coordinator.generations.num_running == 0)
        record = await rig.store.load("s")
        assert record is not None
        assert record.owner == ""
        rest = await coordinator.generate(request(None, session_id="s", resume_from=len(held.token_ids)))
        assert held.token_ids + rest.token_ids == rig.target.worker.greedy_continuation(PROMPT, 200)
        assert rest.finished is not None
        assert rest.finished.usage.num_output_tokens == 200


async def test_info_and_tokenize_describe_the_served_model() -> None:
    async with started_coordinator() as (rig, coordinator):
        served = await coordinator.stub.GetInfo(pb.GetInfoRequest())
        assert served.target_model == "table"
        assert (served.vocabulary_size, served.max_context_tokens, served.max_gamma) == (24, 512, 8)
        assert [(pool.role, pool.name, len(pool.replicas)) for pool in served.pools] == [
            ("draft", "default", 1),
            ("target", "default", 1),
        ]
        assert served.pools[1].replicas[0].address == rig.target.address
        assert [(pool.dtype, pool.shadow) for pool in served.pools] == [("float32", False)] * 2
        tokens = await coordinator.stub.Tokenize(pb.TokenizeRequest(text="w5 w6"))
        assert list(tokens.token_ids) == [5, 6]
        output = await coordinator.generate(
            pb.GenerateRequest(prompt="w5 w6 w7 w8", sampling=pb.SamplingParams(temperature=0, max_new_tokens=8))
        )
        assert output.token_ids == rig.greedy(PROMPT, 8)
