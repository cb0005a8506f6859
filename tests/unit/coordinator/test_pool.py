"""Pools of replicas on real services: which are in use, their common limits, and what is reported when that changes."""

from __future__ import annotations

import asyncio
import logging

import pytest

from coordinator.replicas import pool
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.replica import DRAFT, TARGET
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import NotFound, Unavailable
from specdec.rpc.client import TargetLink, open_link
from tests.support.round_rig import RoundRig
from tests.support.table_services import start_service


async def test_a_replica_is_out_of_use_from_a_failed_call_until_it_answers_again() -> None:
    async with RoundRig() as rig:
        (target,) = rig.pools.targets()
        target.fail(Unavailable("gone"))
        assert (target.is_alive, target.takes_sessions, rig.pools.is_ready) == (False, False, False)
        assert not rig.pools.serves(target.model)
        await rig.pools.poll()
        assert (target.is_alive, target.takes_sessions, rig.pools.is_ready) == (True, True, True)
        assert rig.pools.serves("table-0-table")
        assert not rig.pools.serves("table-1-table")


async def test_a_late_draft_that_died_is_reset_when_it_comes_back() -> None:
    async with RoundRig() as rig:
        (draft,) = rig.pools.drafts("default")
        assert draft.health.note_late(called_at=draft.link.heard_at + 1.0, heard_at=0.0)
        await rig.pools.poll()
        assert draft.health.is_marked  # describing itself is its event loop's work, not its device's
        draft.fail(Unavailable("gone"))
        await rig.pools.poll()
        assert not draft.health.is_marked
        assert draft.is_in_use


async def test_the_smallest_context_and_gamma_of_all_replicas_limit_every_session() -> None:
    services = [
        await start_service(TARGET, salt=0, context=100, max_gamma=6),
        await start_service(TARGET, salt=0, context=300, max_gamma=8),
        await start_service(DRAFT, salt=1, context=50, max_gamma=3),
    ]
    pools = ReplicaPools("table", open_link, static_endpoints=[(service.role, service.address) for service in services])
    while len([replica for replica in pools.all_replicas() if replica.is_alive]) < 3:
        await pools.poll()
    assert (pools.max_context_tokens, pools.max_gamma) == (100, 3)
    small = next(replica for replica in pools.targets() if replica.info and replica.info.max_context_tokens == 100)
    small.fail(Unavailable("gone"))
    assert pools.max_context_tokens == 300
    assert pools.target_info.max_context_tokens == 300
    for target in pools.targets():
        target.fail(Unavailable("gone"))
    assert not pools.is_ready
    assert pools.target_info.model_fingerprint == "table-0-table"
    await pools.close()
    for service in services:
        await service.kill()


async def test_the_served_model_is_unknown_until_a_target_has_been_connected() -> None:
    pools = ReplicaPools("table", open_link, static_endpoints=[(TARGET, "127.0.0.1:1")])
    with pytest.raises(Unavailable, match="no target replica has been connected yet"):
        _ = pools.target_info
    await pools.poll()
    with pytest.raises(Unavailable):
        _ = pools.target_info
    assert pools.route_draft("") == ""
    with pytest.raises(NotFound):
        pools.route_draft("default")
    await pools.close()


async def test_a_change_of_readiness_is_reported_once() -> None:
    told = []

    async def note(is_ready: bool) -> None:
        told.append(is_ready)

    service = await start_service(TARGET, salt=0)
    pools = ReplicaPools("table", open_link, static_endpoints=[(TARGET, service.address)], on_readiness=note)
    while not pools.is_ready:
        await pools.poll()
    await pools.poll()
    assert told == [True]
    await service.kill()
    while pools.is_ready:
        await pools.poll()
    await pools.poll()
    assert told == [True, False]
    await pools.close()


async def test_a_replica_of_the_other_role_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    service = await start_service(TARGET, salt=0)
    pools = ReplicaPools("table", open_link, static_endpoints=[(TARGET, service.address), (DRAFT, service.address)])
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await pools.poll()
    assert [replica.role for replica in pools.all_replicas()] == [TARGET]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert f"{service.address} is not a draft service" in line
    await pools.close()
    await service.kill()


async def test_sessions_sent_to_a_replica_count_until_it_reports_its_own_number() -> None:
    async with RoundRig(drafts=0) as rig:
        (target,) = rig.pools.targets()
        assert target.load == (0, 0)
        rounds = rig.rounds()
        await rounds.run()
        assert target.load == (1, 1)
        target.note_new_session()
        assert target.load == (2, 2)
        await rig.pools.poll()
        assert target.load == (1, 1)  # the one that it really holds, and that has just called


async def test_releasing_a_session_frees_it_at_every_replica_and_ignores_failures() -> None:
    async with RoundRig() as rig:
        await rig.rounds().run()
        assert [engine.info().num_sessions for engine in (*rig.targets, *rig.drafts)] == [1, 1]
        await rig.of(DRAFT)[0].kill()
        await rig.pools.release("s")
        assert rig.targets[0].info().num_sessions == 0


async def test_replicas_are_asked_rarely_while_nothing_changes_and_often_once_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "SETTLED_AFTER_S", 0.2)
    monkeypatch.setattr(pool, "QUIET_POLL_INTERVAL_S", 1000.0)
    service = await start_service(TARGET, salt=0)
    polls, seen, enough = 0, -1, asyncio.Event()

    async def describe() -> EngineInfo:
        nonlocal polls
        polls += 1
        if 0 <= seen <= polls - 3:
            enough.set()
        return await TargetLink.info(link)

    link = TargetLink(service.address)
    monkeypatch.setattr(link, "info", describe)
    pools = ReplicaPools("table", lambda *_: link, static_endpoints=[(TARGET, service.address)], poll_interval_s=0.06)
    watching = asyncio.create_task(pools.watch())
    while True:
        before = polls
        await asyncio.sleep(0.6)
        if polls == before and pools.is_ready:  # no poll within the time of ten
            break
    seen = polls
    (target,) = pools.targets()
    target.fail(Unavailable("gone"))
    async with asyncio.timeout(60):
        await enough.wait()
    assert target.is_alive
    watching.cancel()
    await pools.close()
    await service.kill()
