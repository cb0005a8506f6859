"""Commits of all generations: those asked for in one turn of the event loop go to the store together.

A round's commit comes from `publisher`, which is told when the store has it and then shows the round. Each commit stays
its own atomic step with its own answer. Not here: what to do when the store refuses one (`publisher`), what a commit is
(`specdec.state.store`).
"""

from __future__ import annotations

import asyncio

from specdec.errors import Unavailable
from specdec.state.store import Commit, Lease, SessionStore


class CommitQueue:
    """Sends batches one at a time: what is asked for while one is under way goes with the next."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._waiting: list[tuple[Lease, Commit, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None

    def add(self, lease: Lease, commit: Commit) -> asyncio.Future[None]:
        """Asks for a commit.

        Returns:
            Done when the store has it, or with what `SessionStore.commit` raises. Cancelling it takes nothing back.
        """
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((lease, commit, committed))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(), name="commits")
        return committed

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await self._send(batch)
        finally:
            self._sender = None

    async def _send(self, batch: list[tuple[Lease, Commit, asyncio.Future[None]]]) -> None:
        answers: list[Exception | None]
        try:
            answers = [*await self._store.commit_all([(lease, commit) for lease, commit, _ in batch])]
        except Exception as error:
            answers = [error] * len(batch)
        if all(isinstance(answer, Unavailable) for answer in answers):
            # What has come meanwhile would wait as long again for a store that is not there.
            later, self._waiting = self._waiting, []
            batch, answers = [*batch, *later], [*answers, *answers[:1] * len(later)]
        for (_, _, committed), answer in zip(batch, answers, strict=True):
            if committed.done():  # cancelled: the others still wait for theirs
                continue
            if answer is None:
                committed.set_result(None)
            else:
                committed.set_exception(answer)
