"""Drafts that the target makes by itself, through running services: the same outputs in one trip a round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest

from specdec.contract.types import Verification, VerifyRequest
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Rig, request
from tests.support.output import read_rest, read_until
from tests.support.table_services import start_service

MODES = {
    "rejection": pb.SPECULATION_MODE_REJECTION,
    "block": pb.SPECULATION_MODE_BLOCK,
    "coupled": pb.SPECULATION_MODE_COUPLED,
}
#: The table of another model, as a target's first layers are one.
LOCAL = {"early-exit": 1}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
async def test_a_target_that_drafts_by_itself_gives_its_own_greedy_output_in_fewer_rounds(mode: int) -> None:
    async with Rig(drafts=0, local_drafts=LOCAL) as rig:
        coordinator = await rig.coordinator()
        output = await coordinator.generate(request(mode=mode, max_new_tokens=40, provenance=True))
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 40)
        stats = output.finished.stats
        assert stats.num_accepted_tokens >= 10
        assert stats.num_rounds == 40 - stats.num_accepted_tokens
        assert stats.num_target_only_steps <= 2  # the first, before which nothing is there to draft from, and the last
        drafted = {detail.draft_pool for detail in output.details if detail.source == pb.TOKEN_SOURCE_ACCEPTED}
        assert drafted == {"early-exit"}


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_seeds_coupled_text_is_the_same_with_local_drafts(seed: int) -> None:
    sampled = {"gamma": 3, "temperature": 1.0, "seed": seed, "max_new_tokens": 40}
    async with Rig(drafts=0, local_drafts=LOCAL) as rig:
        coordinator = await rig.coordinator()
        alone = await coordinator.generate(request(mode=pb.SPECULATION_MODE_OFF, **sampled))
        drafted = await coordinator.generate(request(mode=pb.SPECULATION_MODE_COUPLED, **sampled))
        assert drafted.token_ids == alone.token_ids
        assert drafted.finished.stats.num_accepted_tokens >= 5


async def test_a_request_may_ask_for_the_targets_drafts_or_a_models_by_name() -> None:
    async with Rig(local_drafts={"early-exit": 1, "longer": 0}) as rig:
        coordinator = await rig.coordinator()
        drafted = {}
        for pool in ("", "early-exit", "longer", "default"):
            output = await coordinator.generate(request(draft_pool=pool, provenance=True))
            assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
            accepted = {detail.draft_pool for detail in output.details if detail.source == pb.TOKEN_SOURCE_ACCEPTED}
            drafted[pool] = accepted
        assert drafted == {"": {"early-exit"}, **{pool: {pool} for pool in ("early-exit", "longer", "default")}}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(request(draft_pool="shorter"))
        assert from_rpc_error(caught.value).reason == "POOL_NOT_FOUND"


async def test_where_nothing_is_found_in_text_the_target_drafts() -> None:
    async with Rig(drafts=0, local_drafts=LOCAL) as rig:
        coordinator = await rig.coordinator(lookup=("suffix",))
        output = await coordinator.generate(request(max_new_tokens=40, provenance=True))
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 40)
        accepted = [detail.draft_pool for detail in output.details if detail.source == pb.TOKEN_SOURCE_ACCEPTED]
        assert accepted.count("early-exit") >= 10


async def test_a_round_with_a_local_draft_is_one_call() -> None:
    async with Rig(drafts=0) as rig:
        calls: list[VerifyRequest] = []

        def counted(engine: Any) -> Any:
            verify = engine.verify

            async def note(asked: VerifyRequest, on_step: Any = None) -> Verification:
                calls.append(asked)
                return await verify(asked, on_step)

            engine.verify = note
            return engine

        rig.services = [await start_service("target", salt=0, local_drafts=LOCAL, between=counted)]
        coordinator = await rig.coordinator()
        output = await coordinator.generate(request(max_new_tokens=40))
        stats = output.finished.stats
        assert len(calls) == stats.num_rounds
        assert sum(asked.local_draft is not None for asked in calls) >= stats.num_rounds - 1  # the last may need none
        assert not any(len(asked.draft_token_ids) for asked in calls)


async def test_a_target_without_the_local_draft_takes_over_in_mid_stream() -> None:
    async with Rig(targets=0, drafts=0) as rig:
        rig.services = [await start_service("target", salt=0, local_drafts=LOCAL)]
        coordinator = await rig.coordinator()
        first = rig.services[0]
        rig.services.append(await start_service("target", salt=0))
        coordinator.pools._endpoints.static |= {("target", rig.services[1].address)}  # found later, as by a registry
        stream = coordinator.stub.Generate(request(max_new_tokens=60))
        output = await read_until(stream, 12)
        await coordinator.pools.poll()
        await first.kill()
        output = await read_rest(stream, output)
        assert output.token_ids == first.worker.greedy_continuation(PROMPT, 60)
        stats = output.finished.stats
        assert stats.num_accepted_tokens > 0
        assert stats.num_target_only_steps > 5
        rig.services.remove(first)


@pytest.mark.parametrize("gamma", [None, 5])
async def test_no_more_draft_tokens_are_asked_for_than_a_target_says_that_it_drafts(gamma: int | None) -> None:
    """As heads that draft one token each: of two targets, the one with fewer counts."""
    async with Rig(drafts=0) as rig:
        asked_for: list[int] = []

        def noted(engine: Any) -> Any:
            verify = engine.verify

            async def note(asked: VerifyRequest, on_step: Any = None) -> Verification:
                if asked.local_draft is not None:
                    asked_for.append(asked.local_draft.gamma)
                return await verify(asked, on_step)

            engine.verify = note
            return engine

        own = {"salt": 0, "local_drafts": {"other": 1, **LOCAL}, "between": noted}
        rig.services = [await start_service("target", local_gammas=gammas, **own) for gammas in ((0, 3), (1, 2))]
        coordinator = await rig.coordinator()
        output = await coordinator.generate(request(gamma=gamma, draft_pool="early-exit", max_new_tokens=40))
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 40)
        assert max(asked_for) == 2


async def test_pools_that_targets_draft_in_are_told_with_what_they_have_shown() -> None:
    async with Rig(drafts=0, local_drafts=LOCAL) as rig:
        coordinator = await rig.coordinator()
        await coordinator.generate(request(gamma=None, max_new_tokens=40))
        pools = {(pool.role, pool.name): pool for pool in (await coordinator.stub.GetInfo(pb.GetInfoRequest())).pools}
        pool = pools["draft", "early-exit"]
        assert pool.model == "table"
        assert not pool.replicas
        assert 0.2 < pool.alpha < 1.0
        assert pool.gamma > 0


async def test_a_lookups_name_is_not_a_local_drafts() -> None:
    async with Rig(drafts=0) as rig:
        rig.services.append(await start_service("target", salt=0, local_drafts={"suffix": 1}))
        coordinator = await rig.coordinator(lookup=("suffix",), num_alive=1)
        assert not coordinator.pools.local_pools


async def test_drafting_and_verifying_are_each_told_once() -> None:
    """What a target says that drafting took is believed as far as the wait bears it out, and no second time."""
    async with Rig(drafts=0) as rig:

        def boasting(engine: Any) -> Any:
            verify = engine.verify

            async def answer(asked: VerifyRequest) -> Verification:
                verification = await verify(asked)
                if verification.drafted is None:
                    return verification
                return replace(verification, drafted=replace(verification.drafted, forward_s=1e9))

            engine.verify = answer
            return engine

        rig.services = [await start_service("target", salt=0, local_drafts=LOCAL, between=boasting)]
        coordinator = await rig.coordinator()
        stats = (await coordinator.generate(request(max_new_tokens=120))).finished.stats
        assert stats.num_draft_tokens > 50
        assert 0.0 < stats.draft_s + stats.verify_s <= stats.e2el_s
