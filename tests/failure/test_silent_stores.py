"""A Redis that accepts connections and answers nothing: no call waits for a second time-out."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.front import access
from coordinator.front.access import Readiness
from coordinator.generation.publisher import CommitQueue
from specdec.contract.errors import Unavailable
from specdec.state import clients
from specdec.state.redis_store import open_store
from specdec.state.store import Commit, Lease, SessionStore
from tests.support.coordinator_rig import eventually
from tests.support.redis_fixture import RedisServer

#: Time limit of one reply; an attempt and three retries take four of them.
_REPLY_S = 0.2


@pytest.fixture
async def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[RedisServer, SessionStore]]:
    """A store whose server answered once and then hangs; the test may let it continue."""
    monkeypatch.setattr(clients, "REPLY_TIMEOUT_S", _REPLY_S)
    monkeypatch.setattr(clients, "CONNECT_TIMEOUT_S", _REPLY_S)
    server = RedisServer(tmp_path)
    server.start()
    store = open_store(server.url)
    await store.ping()
    server.signal(signal.SIGSTOP)
    yield server, store
    server.signal(signal.SIGCONT)
    await store.close()
    server.stop()


async def check_failing_together(first: Coroutine[Any, Any, Any], second: Coroutine[Any, Any, Any]) -> None:
    """Start `second` while `first` runs, so that it would be sent afterwards."""
    tasks = [asyncio.create_task(first)]
    await asyncio.sleep(_REPLY_S / 2)
    tasks.append(asyncio.create_task(second))
    await asyncio.wait(tasks[:1])
    await asyncio.sleep(_REPLY_S / 2)
    assert tasks[1].done()
    for task in tasks:
        with pytest.raises(Unavailable) as raised:
            await task
        assert raised.value.reason == "STORE_UNAVAILABLE"


async def test_scripts_that_wait_behind_an_unanswered_one_fail_with_it(
    silent: tuple[RedisServer, SessionStore],
) -> None:
    server, store = silent
    await check_failing_together(store.load("a"), store.load("b"))
    server.signal(signal.SIGCONT)
    assert await store.load("a") is None


async def test_commits_that_wait_behind_an_unanswered_one_fail_with_it(
    silent: tuple[RedisServer, SessionStore],
) -> None:
    _, store = silent
    commits = CommitQueue(store)

    async def commit(session_id: str) -> None:
        token_ids = np.array([1], np.uint32)
        await commits.add(Lease(session_id, "us", 1, 1.0), Commit(0, 0, token_ids, "{}", None, b""))

    await check_failing_together(commit("a"), commit("b"))


async def test_a_coordinator_with_a_silent_store_is_unavailable_until_it_answers(
    silent: tuple[RedisServer, SessionStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, store = silent
    monkeypatch.setattr(access, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(access, "_ANSWER_S", 0.1)
    told: list[bool] = []

    async def tell(is_ready: bool) -> None:
        told.append(is_ready)

    ready = Readiness(tell)
    await ready.note_targets(True)
    watching = asyncio.create_task(ready.watch_store(store))
    async with asyncio.timeout(20):
        await eventually(lambda: told == [True, False])
        await ready.note_targets(False)
        await ready.note_targets(True)
        assert told == [True, False]
        server.signal(signal.SIGCONT)
        await eventually(lambda: told == [True, False, True])
    await ready.note_targets(False)
    assert told == [True, False, True, False]
    watching.cancel()
