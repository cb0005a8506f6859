"""Requests routed among draft models by scores, with real coordinators, draft services and targets."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.output import Output, read_rest
from tests.support.table_services import Service, start_service

LEFT = (5, 6, 7, 8)
#: In the test of the limit, instead of 64.
MAX_CLASSES = 10


async def add_drafts(rig: Rig, *, shadow: bool = False, **good_after: int | None) -> dict[str, Service]:
    """Add draft pools, each of which agrees with the target on sessions that begin with its token; None: on none."""
    drafts = {}
    for pool, token_id in good_after.items():
        service = await start_service("draft", salt=1, pool=pool, shadow=shadow)
        knowing, guessing = rig.target.worker.logits_after, service.worker.logits_after

        def logits_after(
            tokens: Any, *model: Any, token_id: int | None = token_id, knowing: Any = knowing, guessing: Any = guessing
        ) -> np.ndarray:
            return (knowing if int(tokens[0]) == token_id else guessing)(tokens, *model)

        service.worker.logits_after = logits_after  # type: ignore[method-assign]
        rig.services.append(service)
        drafts[pool] = service
    return drafts


async def ask(coordinator: Coordinator, prompt: tuple[int, ...] = LEFT, **options: Any) -> tuple[Output, set[str]]:
    """Return a request's output and the pools of its accepted tokens, after all its spans are scored."""
    task = options.pop("task", "")
    asked = request(prompt, gamma=options.pop("gamma", None), provenance=True, **{"max_new_tokens": 40, **options})
    asked.speculation.task = task
    output = await coordinator.generate(asked)
    # A draft whose session is gone expects no call of it, and may score at once.
    await coordinator.stub.DeleteSession(pb.DeleteSessionRequest(session_id=output.started.session_id))
    if coordinator.scores is not None:
        await coordinator.scores_settled()
    return output, {detail.draft_pool for detail in output.details if detail.source == pb.TOKEN_SOURCE_ACCEPTED}


async def routes_of(coordinator: Coordinator) -> dict[str, dict[str, Any]]:
    """Return the statistics of routes by pool and class."""
    pools = (await coordinator.stub.GetInfo(pb.GetInfoRequest())).pools
    return {pool.name: {route.request_class: route for route in pool.routes} for pool in pools if pool.role == "draft"}


async def test_an_unused_pool_is_known_by_its_scores() -> None:
    async with Rig(drafts=0) as rig:
        await add_drafts(rig, a_poor=None, b_good=LEFT[0])
        coordinator = await rig.coordinator(routes=True)
        output, pools = await ask(coordinator, task="left", gamma=3)
        assert output.token_ids == rig.target.worker.greedy_continuation(LEFT, 40)
        assert pools == {"a_poor"}
        routes = await routes_of(coordinator)
        (name,) = routes["b_good"]
        assert name == "left/rejection/greedy"
        assert routes["b_good"][name].alpha == pytest.approx(1.0)
        assert 0.0 < routes["a_poor"][name].alpha < 0.9
        assert (routes["b_good"][name].share, routes["a_poor"][name].share) == (0.0, pytest.approx(1.0))
        pools = {pool.name: pool for pool in (await coordinator.stub.GetInfo(pb.GetInfoRequest())).pools}
        for pool in routes:  # of all its classes, of which there is one
            assert pools[pool].alpha == pytest.approx(routes[pool][name].alpha)
        assert routes["b_good"][name].weight + routes["a_poor"][name].weight == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("asked", "least"),
    [
        ({"temperature": 0.0, "frequency_penalty": 1.5, "logit_bias": {3: 2.0}}, 1.0),
        ({"temperature": 1.0, "mode": pb.SPECULATION_MODE_COUPLED}, 1.0),
        ({"temperature": 1.0, "mode": pb.SPECULATION_MODE_REJECTION}, 0.97),
        ({"temperature": 1.0, "mode": pb.SPECULATION_MODE_BLOCK, "presence_penalty": 1.0, "top_k": 8}, 0.97),
    ],
    ids=["greedy with penalties", "coupled", "rejection", "block with penalties"],
)
async def test_a_pool_of_the_targets_own_model_is_scored_as_such_in_every_mode(
    asked: dict[str, Any], least: float
) -> None:
    """This holds through several spans and a second turn, so position, seed, turn and filters of a score are right.
    Only the truncated part of q is lost."""
    async with Rig(drafts=0) as rig:
        await add_drafts(rig, a_poor=None, b_good=LEFT[0])
        coordinator = await rig.coordinator(routes=True)
        for turn in range(2):
            wanted = request(LEFT, session_id="s", gamma=2, max_new_tokens=150, seed=5, **asked)
            wanted.speculation.task = f"turn {turn}"
            await coordinator.generate(wanted)
            await coordinator.scores_settled()
        routes = await routes_of(coordinator)
        alphas = {name.partition("/")[0]: route.alpha for name, route in routes["b_good"].items()}
        assert set(alphas) == {"turn 0", "turn 1"}
        assert min(alphas.values()) >= least - 1e-6, alphas
        assert max(route.alpha for route in routes["a_poor"].values()) < 0.95


async def test_a_request_that_names_its_pool_keeps_it_and_one_without_speculation_has_no_pool() -> None:
    async with Rig(drafts=0) as rig:
        await add_drafts(rig, a=None, b=LEFT[0])
        coordinator = await rig.coordinator(routes=True)
        for _ in range(6):
            assert (await ask(coordinator, draft_pool="a"))[1] <= {"a"}
        assert await routes_of(coordinator) == {"a": {}, "b": {}}
        assert (await ask(coordinator, mode=pb.SPECULATION_MODE_OFF))[1] == set()


async def test_without_routing_the_first_pool_by_name_drafts_and_nothing_is_scored() -> None:
    async with Rig(drafts=0) as rig:
        drafts = await add_drafts(rig, a=None, b=LEFT[0])
        coordinator = await rig.coordinator()
        for _ in range(3):
            assert (await ask(coordinator))[1] <= {"a"}
        assert not drafts["b"].worker.steps


async def test_when_the_chosen_pool_dies_in_mid_stream_another_one_drafts() -> None:
    async with Rig(drafts=0) as rig:
        drafts = await add_drafts(rig, a=LEFT[0], b=LEFT[0])
        coordinator = await rig.coordinator(routes=True)
        stream = coordinator.stub.Generate(request(LEFT, gamma=2, max_new_tokens=60, provenance=True))
        output = Output()
        while not output.details or output.details[0].draft_pool != "a" or len(output.token_ids) < 10:
            output.add(await stream.read())
        await drafts["a"].kill()
        rig.services.remove(drafts["a"])
        await read_rest(stream, output)
        assert output.token_ids == rig.target.worker.greedy_continuation(LEFT, 60)
        assert "b" in {detail.draft_pool for detail in output.details}


async def test_when_a_session_outgrows_its_pools_context_another_pool_drafts() -> None:
    async with Rig(drafts=0) as rig:
        for pool, context in (("a", 40), ("b", 40), ("c", 512)):
            rig.services.append(await start_service("draft", salt=1, pool=pool, context=context))
        coordinator = await rig.coordinator(routes=True)
        output, pools = await ask(coordinator, max_new_tokens=120, gamma=2)
        assert output.token_ids == rig.target.worker.greedy_continuation(LEFT, 120)
        assert "c" in pools
        # A round for each pool that was outgrown, and the last one, which leaves no room for a draft.
        assert output.finished.stats.num_target_only_steps <= 4


@pytest.mark.full
async def test_the_alpha_of_a_pools_scores_equals_its_alpha_in_use() -> None:
    """24 texts of 48 tokens each at T = 1: the standard error of the difference is below 0.03, so one in 10^5 runs of a
    correct build would differ by 0.13; seeds are fixed. tests/unit/coordinator/test_routing.py has the exact identity,
    and its negative control with p and q swapped."""
    async with Rig(drafts=0) as rig:
        await add_drafts(rig, a=None, b=None)
        rig.services[-1].worker._salt = 2
        scoring, using = await rig.coordinator(routes=True), await rig.coordinator()
        sampled = {"gamma": 8, "temperature": 1.0, "max_new_tokens": 48, "task": "x"}
        await asyncio.gather(*(ask(using, seed=1000 + seed, draft_pool="b", **sampled) for seed in range(24)))
        for seed in range(24):
            await ask(scoring, seed=seed, **sampled)
        routes = await routes_of(scoring)
        pools = (await using.stub.GetInfo(pb.GetInfoRequest())).pools
        used = next(pool.alpha for pool in pools if pool.name == "b")
        assert routes["b"]["x/rejection/warm"].alpha == pytest.approx(used, abs=0.13)


async def test_a_kind_of_prompt_is_its_class_where_the_request_has_no_label() -> None:
    async with Rig(drafts=0) as rig:
        await add_drafts(rig, a=None, b=None)
        coordinator = await rig.coordinator(routes=True)
        await ask(coordinator, PROMPT)
        assert set((await routes_of(coordinator))["a"]) == {"prose/rejection/greedy"}


async def test_labels_beyond_the_limit_share_one_class_and_unlabelled_requests_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coordinator.round.routing_table.MAX_CLASSES", MAX_CLASSES)
    async with Rig(drafts=0) as rig:
        await add_drafts(rig, a=None, b=None)
        coordinator = await rig.coordinator(routes=True)
        for index in range(MAX_CLASSES + 5):
            await ask(coordinator, task=f"task {index}", max_new_tokens=2)
        await ask(coordinator, PROMPT, max_new_tokens=40)
        names = {name.partition("/")[0] for name in (await routes_of(coordinator))["a"]}
        assert names == {*(f"task {index}" for index in range(MAX_CLASSES)), "other", "prose"}


async def test_a_promoted_pool_drafts_for_its_share_of_the_sessions_through_every_coordinator() -> None:
    async with Rig(drafts=0) as rig:
        await add_drafts(rig, a=LEFT[0], b=LEFT[0])
        first, second = await rig.coordinator(routes=True), await rig.coordinator(routes=True)
        told = (await first.stub.Promote(pb.PromoteRequest(draft_pool="b", share=0.5))).promotion
        assert (told.draft_pool, told.share, told.most, told.status) == ("b", 0.01, 0.5, "running")
        assert second.canary is not None
        await second.canary.sync_with_store()
        sessions = [f"s{index}" for index in range(400)]
        promoted = [session_id for session_id in sessions if second.canary.pool_of(session_id)]
        assert 0 < len(promoted) < 40
        others = [session_id for session_id in sessions if session_id not in promoted]
        for coordinator in (first, second):  # each request of a class of its own, of which nothing is known yet
            assert (await ask(coordinator, session_id=promoted.pop(), gamma=3, task="promoted"))[1] == {"b"}
            assert (await ask(coordinator, session_id=others.pop(), gamma=3, task="other"))[1] == {"a"}
        info = await second.stub.GetInfo(pb.GetInfoRequest())
        assert info.promotion == told


async def test_a_coordinator_that_does_not_route_promotes_nothing() -> None:
    async with Rig(drafts=0) as rig:
        await add_drafts(rig, a=None)
        coordinator = await rig.coordinator()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator.stub.Promote(pb.PromoteRequest(draft_pool="a", share=1.0))
        assert from_rpc_error(caught.value).code == "UNIMPLEMENTED"


async def test_a_shadow_is_scored_and_gets_no_request_even_with_the_best_scores() -> None:
    async with Rig(drafts=0) as rig:
        await add_drafts(rig, shadow=True, a_new=LEFT[0])
        await add_drafts(rig, b_old=None)
        coordinator = await rig.coordinator(routes=True)
        for _ in range(12):
            assert (await ask(coordinator, task="x", gamma=3))[1] <= {"b_old"}
        routes = await routes_of(coordinator)
        (new,), (old,) = routes["a_new"].values(), routes["b_old"].values()
        assert new.alpha == pytest.approx(1.0)
        assert old.alpha < 0.9
        assert (new.is_chosen, old.is_chosen) == (False, True)
        assert new.num_tested > 100
        assert (await ask(coordinator, draft_pool="a_new", gamma=3))[1] == {"a_new"}


async def test_without_routing_a_shadow_is_not_the_first_pool_by_name() -> None:
    async with Rig(drafts=0) as rig:
        shadows = await add_drafts(rig, shadow=True, a_new=LEFT[0])
        await add_drafts(rig, b_old=None)
        coordinator = await rig.coordinator()
        assert (await ask(coordinator, gamma=3))[1] <= {"b_old"}
        assert not shadows["a_new"].worker.steps


async def test_a_promoted_shadow_gets_its_share_of_the_sessions() -> None:
    async with Rig(drafts=0) as rig:
        await add_drafts(rig, shadow=True, a_new=LEFT[0])
        await add_drafts(rig, b_old=LEFT[0])
        coordinator = await rig.coordinator(routes=True)
        await coordinator.stub.Promote(pb.PromoteRequest(draft_pool="a_new", share=1.0))
        assert coordinator.canary is not None
        session = next(name for name in map(str, range(2000)) if coordinator.canary.pool_of(name))
        assert (await ask(coordinator, session_id=session, gamma=3))[1] == {"a_new"}
