"""Drafts found in text, through running services: the same outputs in fewer rounds."""

from __future__ import annotations

import grpc
import pytest

from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Rig, request
from tests.support.table_services import start_service

MODES = {
    "rejection": pb.SPECULATION_MODE_REJECTION,
    "block": pb.SPECULATION_MODE_BLOCK,
    "coupled": pb.SPECULATION_MODE_COUPLED,
}
LOOKUP = ("suffix", "ngram")


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
async def test_an_earlier_output_drafts_the_same_greedy_output_in_a_few_rounds(mode: int) -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator(lookup=LOOKUP)
        first = await coordinator.generate(request(mode=mode, gamma=8, max_new_tokens=40))
        await coordinator.history_settled()
        second = await coordinator.generate(request(mode=mode, gamma=8, max_new_tokens=40, provenance=True))
        assert first.token_ids == second.token_ids == rig.target.worker.greedy_continuation(PROMPT, 40)
        stats = second.finished.stats
        assert first.finished.stats.num_accepted_tokens == 0
        assert stats.num_accepted_tokens >= 30
        assert stats.num_rounds <= 10
        drafted = {detail.draft_pool for detail in second.details if detail.source == pb.TOKEN_SOURCE_ACCEPTED}
        assert drafted == {"suffix"}


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_coupled_text_of_a_seed_is_the_same_with_found_drafts(seed: int) -> None:
    sampled = {"mode": pb.SPECULATION_MODE_COUPLED, "gamma": 8, "temperature": 1.0, "seed": seed}
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator(lookup=LOOKUP)
        alone = await coordinator.generate(request(**{**sampled, "mode": pb.SPECULATION_MODE_OFF}, max_new_tokens=40))
        await coordinator.history_settled()
        found = await coordinator.generate(request(**sampled, max_new_tokens=40))
        assert found.token_ids == alone.token_ids
        assert found.finished.stats.num_accepted_tokens >= 20


async def test_where_nothing_is_found_the_draft_model_drafts() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator(lookup=LOOKUP)
        output = await coordinator.generate(request(gamma=3, max_new_tokens=40, provenance=True))
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 40)
        accepted = [detail.draft_pool for detail in output.details if detail.source == pb.TOKEN_SOURCE_ACCEPTED]
        assert set(accepted) <= {"default", "suffix"}
        assert accepted.count("default") >= 10


async def test_a_request_may_name_the_model_or_the_lookup() -> None:
    async with Rig(draft_salt=0) as rig:
        coordinator = await rig.coordinator(lookup=LOOKUP)
        for pool in ("default", "ngram", "suffix"):
            output = await coordinator.generate(request(draft_pool=pool, max_new_tokens=16))
            assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 16)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(request(draft_pool="prefix"))
        assert from_rpc_error(caught.value).reason == "POOL_NOT_FOUND"


async def test_without_a_lookup_no_pool_has_its_name() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.generate(request(draft_pool="suffix"))
        assert from_rpc_error(caught.value).reason == "POOL_NOT_FOUND"


async def test_tenants_do_not_draft_from_each_others_outputs() -> None:
    async with Rig(drafts=0) as rig:
        ours = await rig.coordinator(lookup=LOOKUP)
        theirs = await rig.coordinator(lookup=LOOKUP, tenant="other")
        await ours.generate(request(gamma=None, max_new_tokens=40))
        await ours.history_settled()
        await theirs.history_settled()
        output = await theirs.generate(request(gamma=None, max_new_tokens=40))
        assert output.finished.stats.num_accepted_tokens == 0


async def test_pools_without_replicas_are_listed_with_their_statistics() -> None:
    async with Rig(drafts=0) as rig:
        coordinator = await rig.coordinator(lookup=LOOKUP)
        for _ in range(2):
            await coordinator.generate(request(gamma=8, max_new_tokens=40))
            await coordinator.history_settled()
        pools = {pool.name: pool for pool in (await coordinator.stub.GetInfo(pb.GetInfoRequest())).pools}
        assert pools["suffix"].role == pools["ngram"].role == "draft"
        assert not pools["suffix"].replicas
        assert pools["suffix"].alpha > 0.9
        assert not pools["ngram"].HasField("alpha")


async def test_a_draft_replica_under_the_name_of_a_lookup_is_left_out() -> None:
    async with Rig(drafts=0) as rig:
        rig.services.append(await start_service("draft", salt=1, pool="suffix"))
        coordinator = await rig.coordinator(lookup=LOOKUP, num_alive=1)
        pools = (await coordinator.stub.GetInfo(pb.GetInfoRequest())).pools
        assert not any(pool.replicas for pool in pools if pool.name == "suffix")
        output = await coordinator.generate(request(max_new_tokens=10))
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 10)
