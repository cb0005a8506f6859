"""A session stays with its replica while that lives, and only tokens that a replica may lack are sent."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from coordinator.generation import log_repair
from coordinator.replicas import placement as placement_module
from coordinator.replicas.placement import Placement, SessionReplicas, choose_replica
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import TARGET, TargetReplica
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import NotFound, Unavailable
from specdec.contract.tenant import SessionKey
from specdec.rpc import rounds
from specdec.rpc.client import TargetLink, open_link
from tests.support.coordinator_rig import Rig, request, started_coordinator


def make_replica(address: str, *, num_sessions: int = 0, num_running: int = 0, draining: bool = False) -> TargetReplica:
    replica = TargetReplica(TARGET, address, TargetLink(address))
    replica.info = EngineInfo(
        version="0",
        role=TARGET,
        pool="default",
        replica_id=address,
        model="m",
        model_fingerprint="m",
        vocabulary_fingerprint="v",
        vocabulary_size=10,
        max_context_tokens=100,
        eos_token_ids=(1,),
        max_gamma=4,
        num_kv_blocks=1,
        kv_block_tokens=16,
        kv_usage=0.0,
        num_sessions=num_sessions,
        num_running=num_running,
        draining=draining,
        dtype="float32",
        device="cpu",
    )
    replica.is_alive = True
    return replica


def test_the_less_loaded_of_two_takes_a_new_session() -> None:
    busy, idle = make_replica("a:1", num_sessions=9), make_replica("b:1")
    assert all(choose_replica(f"s{index}", [busy, idle]) is idle for index in range(20))


def test_sessions_that_are_only_held_count_less_than_running_ones() -> None:
    """Otherwise a new replica would get every new session until it held as many as the old ones."""
    old, new = make_replica("a:1", num_sessions=500, num_running=2), make_replica("b:1")
    chosen = []
    for index in range(40):
        replica = choose_replica(f"s{index}", [old, new])
        assert replica is not None
        replica.note_new_session()
        chosen.append(replica)
    assert (chosen.count(old), chosen.count(new)) == (19, 21)


def test_sessions_spread_over_many_equal_replicas() -> None:
    replicas = [make_replica(f"{name}:1") for name in "abcdefgh"]
    for index in range(400):
        chosen = choose_replica(f"session-{index}", replicas)
        assert chosen is not None
        chosen.note_new_session()
    loads = [replica.load[0] for replica in replicas]
    assert max(loads) - min(loads) <= 8


def test_every_coordinator_picks_the_same_two_replicas_for_a_session() -> None:
    found = []
    for index in range(12):
        replicas = [make_replica(f"{name}:1") for name in "abcdef"]
        for _ in range(2):
            chosen = choose_replica(f"s{index}", replicas)
            assert chosen is not None
            chosen.note_new_session()
            found.append(chosen.address[0])
    # Those of another version too: a session that is taken over is looked for where its KV is.
    assert "".join(found) == "deeabdbddacabafaacebbddf"


def test_dead_and_draining_replicas_take_no_new_session() -> None:
    dead, draining = make_replica("a:1"), make_replica("b:1", draining=True)
    dead.fail(Unavailable("gone"))
    assert choose_replica("s", [dead, draining]) is None
    living = make_replica("c:1")
    assert choose_replica("s", [dead, draining, living]) is living


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig(targets=3, drafts=2) as rig:
        yield rig


async def connect(rig: Rig) -> ReplicaPools:
    pools = ReplicaPools(
        "table", open_link, static_endpoints=[(service.role, service.address) for service in rig.services]
    )
    while sum(replica.is_alive for replica in pools.all_replicas()) < len(rig.services):
        await pools.poll()  # again where a starved service was late to describe itself
    return pools


async def test_a_session_sticks_until_its_replica_fails(rig: Rig) -> None:
    pools = await connect(rig)
    replicas = SessionReplicas("s", pools)
    replicas.target_fingerprint = "table-0-table"
    first = replicas.choose_target()
    assert {replicas.choose_target() for _ in range(5)} == {first}
    first.fail(Unavailable("gone"))
    second = replicas.choose_target()
    assert second is not first
    assert replicas.choose_target([second]) is not second
    with pytest.raises(Unavailable, match=r"^no target replica that serves the session's model can be reached$"):
        replicas.choose_target(pools.targets())
    await pools.close()


async def test_a_draining_target_keeps_its_sessions_and_gets_no_new_ones(rig: Rig) -> None:
    pools = await connect(rig)
    replicas = SessionReplicas("s", pools)
    replicas.target_fingerprint = "table-0-table"
    draining = replicas.choose_target()
    others = [replica for replica in pools.targets() if replica is not draining]
    assert draining.info is not None
    draining.info = replace(draining.info, draining=True)
    assert replicas.choose_target() is draining
    assert replicas.has_target(())
    assert replicas.has_target([draining])
    fresh = SessionReplicas("new", pools)
    fresh.target_fingerprint = "table-0-table"
    assert fresh.choose_target() in others
    assert fresh.choose_target(others) is draining  # it answers the turns of its model until it refuses a call
    draining.note_draining()
    assert not replicas.has_target(others)
    replicas.begin_turn(0, (), {})
    assert replicas.choose_target() in others
    await pools.close()


async def test_a_session_is_counted_once_at_the_replica_that_gets_it(rig: Rig) -> None:
    pools = await connect(rig)
    replicas = SessionReplicas("s", pools)
    replicas.target_fingerprint, replicas.draft_pool = "table-0-table", "default"
    for _ in range(3):
        replicas.choose_target()
        replicas.choose_draft()
    assert sorted(replica.load for replica in pools.targets()) == [(0, 0), (0, 0), (1, 1)]
    assert sorted(replica.load for replica in pools.drafts("default")) == [(0, 0), (1, 1)]
    await pools.close()


async def test_a_session_has_no_replica_before_its_pool_and_model_are_set(rig: Rig) -> None:
    pools = await connect(rig)
    replicas = SessionReplicas("s", pools)
    assert (replicas.draft_pool, replicas.target_fingerprint) == ("", "")
    assert replicas.choose_draft() is None
    assert not replicas.has_target(())
    await pools.close()


async def test_a_draft_is_kept_while_it_is_in_use_and_in_the_sessions_pool(rig: Rig) -> None:
    pools = await connect(rig)
    replicas = SessionReplicas("s", pools)
    replicas.draft_pool = "default"
    first = replicas.choose_draft()
    assert first is not None
    assert first.info is not None
    second = next(replica for replica in pools.drafts("default") if replica is not first)
    assert {replicas.choose_draft() for _ in range(5)} == {first}
    first.info = replace(first.info, draining=True)
    assert replicas.choose_draft() is first
    second.fail(Unavailable("gone"))
    replicas.begin_turn(0, (), {})
    assert replicas.choose_draft() is None  # the next turn has no draft rather than one that leaves
    await pools.poll()
    first.info = replace(first.info, draining=False)
    replicas = SessionReplicas("s", pools)
    replicas.draft_pool = "default"
    assert replicas.choose_draft() is first
    first.info = replace(first.info, pool="other", draining=False)
    assert replicas.choose_draft() is second
    replicas.draft_pool = "other"
    assert replicas.choose_draft() is first
    first.fail(Unavailable("gone"))
    assert replicas.choose_draft() is None
    replicas.draft_pool = "default"
    assert replicas.choose_draft() is second
    await pools.close()


async def test_no_failover_changes_the_sessions_model(rig: Rig) -> None:
    pools = await connect(rig)
    replicas = SessionReplicas("s", pools)
    replicas.target_fingerprint = "another"
    with pytest.raises(Unavailable, match="no target replica that serves the session's model"):
        replicas.choose_target()
    assert not replicas.has_target(())
    await pools.close()


async def test_an_unknown_pool_is_refused_and_an_unnamed_one_is_routed(rig: Rig) -> None:
    pools = await connect(rig)
    assert pools.route_draft("") == "default"
    with pytest.raises(NotFound) as caught:
        pools.route_draft("nowhere")
    assert caught.value.reason == "POOL_NOT_FOUND"
    for replica in pools.drafts("default"):
        replica.fail(Unavailable("gone"))
    assert pools.route_draft("default") == "default"
    await pools.close()


def test_only_tokens_that_a_replica_may_lack_are_sent() -> None:
    replicas, replica = SessionReplicas("s", ReplicaPools("v", open_link)), make_replica("a:1")
    assert replicas.start_for(replica, 10) == 0
    replicas.learn(replica, 8)
    assert replicas.start_for(replica, 10) == 8
    assert replicas.start_for(replica, 8) == 7
    replicas.truncate_to(6)
    assert replicas.start_for(replica, 10) == 6
    assert replicas.start_for(make_replica("b:1"), 10) == 0
    replicas.truncate_to(10, assumed_len=9)
    assert replicas.start_for(make_replica("b:1"), 10) == 9


def test_the_least_recently_used_sessions_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_module, "MAX_REMEMBERED_SESSIONS", 2)
    placement = Placement(ReplicaPools("v", open_link))
    first, second = placement.session(SessionKey("t", "a")), placement.session(SessionKey("t", "b"))
    assert placement.session(SessionKey("t", "a")) is first
    third = placement.session(SessionKey("t", "c"))
    assert placement.session(SessionKey("t", "a")) is first
    assert placement.session(SessionKey("t", "c")) is third
    assert placement.session(SessionKey("t", "b")) is not second
    placement.forget(SessionKey("t", "c"))
    placement.forget(SessionKey("t", "nobody"))
    assert placement.session(SessionKey("t", "c")) is not third


async def test_a_session_finds_its_own_replicas_in_the_pools_of_its_coordinator(rig: Rig) -> None:
    pools = await connect(rig)
    placement, chosen = Placement(pools), set()
    for index in range(40):
        replicas = placement.session(SessionKey("t", f"session-{index}"))
        replicas.target_fingerprint = "table-0-table"
        chosen.add(replicas.choose_target().address)
    assert chosen == {service.address for service in rig.of_role(TARGET)}
    await pools.close()


def _kept_objects() -> Counter[str]:
    """Return the number of live objects of the coordinator's classes, and of what it sends to replicas, by class."""
    gc.collect()
    names = (f"{type(each).__module__}.{type(each).__name__}" for each in gc.get_objects())
    kept = ("coordinator.", "specdec.contract.tenant.", "specdec.state.", "specdec.contract.types.SamplingFilters")
    return Counter(name for name in names if name.startswith(kept))


async def test_requests_one_after_another_leave_no_more_behind_than_the_remembered_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 16
    for module, limit in (
        (log_repair, "MAX_SESSIONS"), (placement_module, "MAX_REMEMBERED_SESSIONS"), (rounds, "_MAX_CACHED")
    ):  # fmt: skip
        monkeypatch.setattr(module, limit, most)
    for cache in ("_encoded_requests", "_decoded_filters"):  # full of other tests' entries, which share their filters
        monkeypatch.setattr(rounds, cache, {})
    async with started_coordinator() as (_, coordinator):

        async def ask(count: int) -> None:
            for number in range(count):
                await coordinator.generate(request([3 + number % 20, 4], max_new_tokens=2))

        await ask(2 * most)
        before = _kept_objects()
        await ask(4 * most)
        grown = {name: number for name, number in (_kept_objects() - before).items() if number > most // 2}
    assert not grown
