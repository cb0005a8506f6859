"""Replicas with impossible descriptions, scores or drafts: they are skipped with one log line, or their answers are
ignored; requests continue with the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import grpc
import pytest

from coordinator.replicas.draft_pool_names import MAX_POOLS
from coordinator.replicas.replica import DRAFT, TARGET
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import InvalidRequest, Unavailable
from specdec.contract.types import Proposal, Score, ScoreRequest, Verification, VerifyRequest
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Coordinator, Rig, request
from tests.support.table_services import VOCABULARY, start_service

LEFT = (5, 6, 7, 8)
#: Of an output; the draft is right about some of them.
NUM_TOKENS = 8


class Between:
    """An engine with methods that a test replaces."""

    def __init__(self, engine: Any, **instead: Any) -> None:
        self._engine = engine
        self.__dict__ |= instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def describing(**changes: Any) -> Callable[[Any], Any]:
    """Return a change of an engine's description; functions are called each time."""

    def between(engine: Any) -> Between:
        def info() -> EngineInfo:
            told = {name: value() if callable(value) else value for name, value in changes.items()}
            return replace(engine.info(), **told)

        return Between(engine, info=info)

    return between


async def pools_of(coordinator: Coordinator) -> set[str]:
    return {pool.name for pool in (await coordinator.stub.GetInfo(pb.GetInfoRequest())).pools if pool.role == DRAFT}


@pytest.mark.parametrize(
    ("role", "changes"),
    [
        (DRAFT, {"pool": ""}),
        (DRAFT, {"pool": "a" * 1_000_000}),
        (DRAFT, {"pool": "red\x1b[31m"}),
        (DRAFT, {"pool": "two\nlines"}),
        (DRAFT, {"max_gamma": 0}),
        (DRAFT, {"max_gamma": 2**32 - 1}),
        (DRAFT, {"version": "v" * 1_000_000}),
        (DRAFT, {"kv_usage": nan}),
        (TARGET, {"kv_usage": -0.5}),
        (TARGET, {"step_limit_s": inf}),
        (TARGET, {"step_limit_s": -1.0}),
        (TARGET, {"eos_token_ids": tuple(range(20)), "unsupported_fields": ("x",) * 10_000}),
        (TARGET, {"local_drafts": ("",)}),
        (TARGET, {"local_drafts": ("mtp", "m" * 1_000_000)}),
        (TARGET, {"local_drafts": ("\x07",)}),
        (TARGET, {"local_drafts": tuple(f"p{index}" for index in range(100_000))}),
        (TARGET, {"adapter_names": ("sql\x1b[31m",), "adapter_fingerprints": ("f",)}),
        (TARGET, {"adapter_names": ("sql",) * 1_000}),
        (TARGET, {"max_gamma": 0}),
        (TARGET, {"max_context_tokens": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
async def test_a_replica_with_an_impossible_description_is_skipped_with_one_log_line(
    role: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig() as rig:
        rig.services.append(await start_service(role, salt=2 * (role == DRAFT), between=describing(**changes)))
        coordinator = await rig.coordinator(num_alive=2)
        for _ in range(3):
            await coordinator.pools.poll()
        refused = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(refused) == 1, refused
        assert rig.services[-1].address in refused[0]
        assert len(refused[0]) < 400
        assert refused[0].isprintable()
        for index in range(4):
            output = await coordinator.generate(request(session_id=f"s{index}", max_new_tokens=NUM_TOKENS))
            assert output.token_ids == rig.target.worker.greedy_continuation(LEFT, NUM_TOKENS)
            assert output.finished.stats.num_accepted_tokens
        assert await pools_of(coordinator) == {"default"}


async def test_the_number_of_pool_names_is_bounded_for_a_replica_that_changes_its_pool() -> None:
    names = (f"pool-{index}" for index in range(10_000))
    async with Rig() as rig:
        rig.services.append(await start_service(DRAFT, salt=2, between=describing(pool=lambda: next(names))))
        coordinator = await rig.coordinator(num_alive=2, routes=True)
        for _ in range(MAX_POOLS + 20):
            await coordinator.pools.poll()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(request(draft_pool=f"pool-{MAX_POOLS + 10}"))
        error = from_rpc_error(caught.value)
        assert (error.reason, error.field) == ("POOL_NOT_FOUND", "speculation.draft_pool")
        assert len(error.message) < 2000  # within gRPC's limit of a status message
        output = await coordinator.generate(request())
        assert output.token_ids == rig.target.worker.greedy_continuation(LEFT, 24)
        assert output.finished.stats.num_accepted_tokens


#: Tokens of an output that a draft is asked to score: all but the first one.
NUM_SCORED = 15


def scoring(**changes: Any) -> Callable[[Any], Any]:
    """Return a change of a draft's scores."""

    def between(engine: Any) -> Between:
        async def score(asked: ScoreRequest) -> Score:
            if isinstance(error := changes.get("error"), Exception):
                raise error
            return replace(await engine.score(asked), **changes)

        return Between(engine, score=score)

    return between


@pytest.mark.parametrize(
    "changes",
    [
        {"q": (nan,) * NUM_SCORED},
        {"q": (2.0,) * NUM_SCORED},
        {"q": (-1.0,) * NUM_SCORED},
        {"q": (inf,) * NUM_SCORED},
        {"q": ()},
        {"q": (1.0,) * 1_000_000},
        {"step_s": inf},
        {"step_s": nan},
        {"step_s": -1.0},
        {"forward_s": nan},
        {"error": InvalidRequest("no", field="token_ids")},
        {"error": Unavailable("gone")},
        {"error": RuntimeError("broken")},
    ],
    ids=lambda changes: str(changes)[:40],
)
async def test_an_invalid_score_does_not_count_for_its_pool_and_requests_continue(changes: dict[str, Any]) -> None:
    async with Rig(drafts=0) as rig:
        for pool, between in (("a", lambda engine: engine), ("b", scoring(**changes))):
            rig.services.append(await start_service(DRAFT, salt=1, pool=pool, between=between))
        coordinator = await rig.coordinator(routes=True)
        for index in range(2):
            asked = request(LEFT, session_id=f"s{index}", max_new_tokens=NUM_SCORED + 1, gamma=3)
            output = await coordinator.generate(asked)
            assert output.token_ids == rig.target.worker.greedy_continuation(LEFT, NUM_SCORED + 1)
            await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=f"s{index}"))
            await asyncio.wait_for(coordinator.scores_settled(), 30)
        pools = {pool.name: pool for pool in (await coordinator.stub.GetInfo(pb.GetInfoRequest())).pools}
        assert [route.HasField("alpha") for route in pools["b"].routes] == [False]
        assert pools["a"].routes[0].is_chosen


def drafting(change: Callable[[Proposal], Proposal]) -> Callable[[Any], Any]:
    """Return a change of the local drafts in a target's answers."""

    def between(engine: Any) -> Between:
        async def verify(asked: VerifyRequest) -> Verification:
            verification = await engine.verify(asked)
            if verification.drafted is None:
                return verification
            return replace(verification, drafted=change(verification.drafted))

        return Between(engine, verify=verify)

    return between


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "change",
    [
        lambda drafted: replace(
            drafted,
            draft_token_ids=drafted.draft_token_ids + VOCABULARY,
            supports=tuple(replace(support, token_ids=support.token_ids + VOCABULARY) for support in drafted.supports),
        ),
        lambda drafted: replace(drafted, draft_token_ids=drafted.draft_token_ids[:0], supports=()),
        lambda drafted: replace(drafted, draft_token_ids=drafted.draft_token_ids.repeat(3)),
        lambda drafted: replace(drafted, lost_mass=(0.0,) * 99),
    ],
    ids=["outside the vocabulary", "none", "more than were asked for", "masses that belong to none"],
)
async def test_a_request_with_invalid_local_drafts_continues_at_another_target(
    change: Callable[[Proposal], Proposal], temperature: float
) -> None:
    async with Rig(drafts=0, local_drafts={"early-exit": 1}) as rig:
        liar = await start_service(TARGET, salt=0, local_drafts={"early-exit": 1}, between=drafting(change))
        rig.services.append(liar)
        coordinator = await rig.coordinator()
        for index in range(8):
            asked = request(session_id=f"s{index}", temperature=temperature, seed=index, max_new_tokens=NUM_TOKENS)
            output = await coordinator.generate(asked)
            assert len(output.token_ids) == NUM_TOKENS
            assert max(output.token_ids) < VOCABULARY
            if not temperature:
                assert output.token_ids == rig.target.worker.greedy_continuation(LEFT, NUM_TOKENS)
        assert liar.worker.steps
