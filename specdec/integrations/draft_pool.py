"""A draft pool for an engine's thread: draft tokens for the rows of a batch, within a deadline, or none.

The engine waits for its drafter in every step, so a call takes at most the deadline, or 4 ms more if the thread of
the links is held up. A replica that does not answer within the deadline is left out until it has answered again. Draft
tokens are greedy, so an engine that verifies them by rejection sampling treats them as a distribution with one token,
which is exact for every sampler.

Links and their event loop run on their own thread. Opened by `vllm` for `vllm`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from specdec.access.tls import Tls
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import InvalidSetting, KvMiss, SpecdecError, Unavailable
from specdec.contract.types import TokenIds
from specdec.integrations.row_sessions import RowSession, RowSessions
from specdec.rpc.client import DraftLink
from specdec.rpc.handshake import Metadata

#: Time in which the replicas must describe themselves at the start.
_CONNECT_S = 30.0
#: Time beyond the deadline after which the engine goes on although the loop's thread has not said what is late.
_GRACE_S = 0.004

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


class DraftPool:
    """The draft replicas of one engine. Use from one thread."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        vocabulary_fingerprint: str,
        deadline_s: float,
        metadata: Metadata = (),
        tls: Tls | None = None,
    ) -> None:
        """Connect to the replicas.

        Args:
            endpoints: HOST:PORT of each draft replica.
            vocabulary_fingerprint: fingerprint of the engine's vocabulary.
            deadline_s: longest time that `propose` waits for replicas.
            metadata: credential of the caller.
            tls: credentials of the connections; None: plaintext.

        Raises:
            InvalidSetting: no replica is named, or one has another vocabulary.
            Unavailable: a replica cannot be reached.
        """
        if not endpoints:
            raise InvalidSetting("endpoint: name at least one draft replica, HOST:PORT", field="endpoint")
        self._deadline_s = deadline_s
        self._links: dict[str, DraftLink] = {}
        self._late: set[str] = set()
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._sessions = RowSessions()
        self._order = itertools.cycle(endpoints)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="specdec-drafts", daemon=True).start()
        self._max_gamma = 1 << 16
        for endpoint in endpoints:
            info = self._run(self._connect(endpoint, metadata, tls), _CONNECT_S)
            if info.vocabulary_fingerprint != vocabulary_fingerprint:
                raise InvalidSetting(
                    f"endpoint: the draft at {endpoint} has the vocabulary {info.vocabulary_fingerprint}, the engine's "
                    f"model {vocabulary_fingerprint}; start it with a model of this vocabulary",
                    field="endpoint",
                )
            self._max_gamma = min(self._max_gamma, info.max_gamma)

    def propose(self, rows: Mapping[int, TokenIds], gamma: int) -> dict[int, list[int]]:
        """Return draft tokens for rows of a batch; a row whose replica does not answer in time is left out.

        Args:
            rows: uint32 tokens of each row so far.
            gamma: number of draft tokens wanted of each row.
        """
        deadline_s = time.monotonic() + self._deadline_s
        sessions = self._sessions.match(rows, next(self._order))
        proposing = self._propose_all(sessions, min(gamma, self._max_gamma), deadline_s)
        future = asyncio.run_coroutine_threadsafe(proposing, self._loop)
        try:
            return future.result(self._deadline_s + _GRACE_S)
        except TimeoutError:
            # The loop's thread was held up. It may still change these sessions, so later calls do not use them.
            self._sessions = RowSessions()
            return {}

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._loop.is_running():
            self._run(self._close(), _CONNECT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, coroutine: Coroutine[Any, Any, ResultT], timeout_s: float | None) -> ResultT:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    async def _connect(self, endpoint: str, metadata: Metadata, tls: Tls | None) -> EngineInfo:
        link = self._links[endpoint] = DraftLink(endpoint, metadata=metadata, tls=tls)
        return await link.info()

    async def _propose_all(
        self, sessions: Mapping[int, RowSession], gamma: int, deadline_s: float
    ) -> dict[int, list[int]]:
        if time.monotonic() >= deadline_s:  # the loop was held up, and the engine has gone on
            return {}
        asked = {
            row: asyncio.ensure_future(self._propose(session, gamma))
            for row, session in sessions.items()
            if self._answers_in_time(session)
        }
        if not asked:
            return {}
        _, late = await asyncio.wait(asked.values(), timeout=max(0.0, deadline_s - time.monotonic()))
        for row, task in asked.items():
            if task in late:
                task.cancel()
                self._note_late(sessions[row], "it missed the deadline")
        return {row: tokens for row, task in asked.items() if task not in late and (tokens := task.result())}

    async def _propose(self, session: RowSession, gamma: int) -> list[int]:
        """Return the draft tokens of a session; [] if its replica fails."""
        link = self._links[session.endpoint]
        try:
            try:
                proposal = await link.propose(session.request(gamma))
            except KvMiss as miss:
                session.known_len = min(miss.have, session.known_len)
                proposal = await link.propose(session.request(gamma))
        except Unavailable as error:
            self._note_late(session, error.message)
            return []
        except SpecdecError as error:
            _log.debug("no draft: endpoint=%s error=%s", session.endpoint, error)
            session.known_len = 0
            return []
        session.known_len = min(proposal.kv_len, len(session.token_ids))
        tokens: list[int] = proposal.draft_token_ids.tolist()
        return tokens

    def _answers_in_time(self, session: RowSession) -> bool:
        """Return whether a session's replica answers in time; a session of a late one moves to another."""
        if session.endpoint not in self._late:
            return True
        others = [endpoint for endpoint in self._links if endpoint not in self._late]
        if others:
            session.move(others[0])
        return bool(others)

    def _note_late(self, session: RowSession, reason: str) -> None:
        endpoint = session.endpoint
        session.known_len = 0
        if endpoint in self._late:
            return
        self._late.add(endpoint)
        _log.warning("draft replica is left out until it answers: endpoint=%s reason=%s", endpoint, reason)
        self._probes[endpoint] = asyncio.ensure_future(self._await_answer(endpoint))

    async def _await_answer(self, endpoint: str) -> None:
        """Ask a late replica for its description until it answers."""
        while True:
            try:
                await self._links[endpoint].info()
                break
            except SpecdecError:
                await asyncio.sleep(0.5)
        self._late.discard(endpoint)
        _log.info("draft replica is used again: endpoint=%s", endpoint)

    async def _close(self) -> None:
        for probe in self._probes.values():
            probe.cancel()
        for link in self._links.values():
            await link.close()
