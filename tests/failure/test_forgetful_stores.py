"""A store that is unreachable, or returns without its latest writes, while a generation runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from specdec.errors import SessionLost, Unavailable
from specdec.rpc.status import from_rpc_error
from specdec.state.keys import pack_tokens, session_keys
from tests.support.coordinator_rig import PROMPT, Rig, eventually, read_rest, read_until, request
from tests.support.interrupted_store import coordinator_on


class FailingCommits:
    """A session store whose commits fail while a test says so."""

    def __init__(self, store: Any, error: Exception) -> None:
        self._store = store
        self._error = error
        self.num_left = 0

    def of_tenant(self, tenant: str) -> FailingCommits:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "commit_all" and self.num_left > 0:
            return self._fail
        if name == "repair" and self.num_left > 0:
            return self._fail_one
        return getattr(self._store, name)

    async def _fail(self, commits: Sequence[Any]) -> list[Exception]:
        self.num_left -= 1
        await self.lose()
        return [self._error] * len(commits)

    async def _fail_one(self, *_: Any, **__: Any) -> None:
        self.num_left -= 1
        raise self._error

    async def lose(self) -> None:
        """Hook for a further change of the store while commits fail."""


async def reason_of_end(stream: Any, held: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_rest(stream, held)
    return from_rpc_error(caught.value).reason


async def test_a_store_that_returns_without_the_latest_tokens_is_repaired() -> None:
    async with asyncio.timeout(30), Rig(drafts=0) as rig:

        class Crashing(FailingCommits):
            async def lose(self) -> None:
                key = session_keys("default", "s")[1]
                await rig.store._connection.run_command("SET", key, pack_tokens(np.array(PROMPT, np.uint32)), "KEEPTTL")

        store = Crashing(rig.store, Unavailable("away", reason="STORE_UNAVAILABLE"))
        coordinator = await coordinator_on(rig, store)  # type: ignore[arg-type]
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=100))
        held = await read_until(stream, 5)
        store.num_left = 1
        await read_rest(stream, held)
        assert held.token_ids == rig.target.worker.greedy_continuation(PROMPT, 100)
        assert (await rig.store.read_tokens("s")).tolist() == [*PROMPT, *held.token_ids]


async def test_a_session_that_lost_shown_tokens_is_not_marked_as_left_in_order() -> None:
    """Otherwise a next turn that depends on the lost tokens would be appended without an error."""
    async with asyncio.timeout(30), Rig(drafts=0) as rig:
        store = FailingCommits(rig.store, SessionLost("lost"))
        coordinator = await coordinator_on(rig, store)  # type: ignore[arg-type]
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        held = await read_until(stream, 5)
        store.num_left = 1000
        assert await reason_of_end(stream, held) == "SESSION_LOST"
        await eventually(lambda: coordinator.generations.num_running == 0)
        record = await rig.store.load("s")
        assert record is not None
        assert not record.was_left


async def test_a_request_whose_session_vanishes_from_the_store_fails_with_lease_lost() -> None:
    async with asyncio.timeout(30), Rig(drafts=0) as rig:

        class Gone(FailingCommits):
            async def load(self, session_id: str) -> Any:
                return None if self.num_left > 0 else await self._store.load(session_id)

        store = Gone(rig.store, SessionLost("lost"))
        coordinator = await coordinator_on(rig, store)  # type: ignore[arg-type]
        stream = coordinator.stub.Generate(request(session_id="s", max_new_tokens=300))
        held = await read_until(stream, 5)
        store.num_left = 1000
        assert await reason_of_end(stream, held) == "LEASE_LOST"
