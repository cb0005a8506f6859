"""Computes the masks of calls in threads, within limits of time.

Each session keeps its matcher from call to call. A call whose masks take too long ends by name. A session whose masks
were slow computes the next ones in threads for slow sessions, so quick sessions wait for a slow one at most once.
Called by the device loop of our own engine (`specdec.engine.loop.constraint_masks`) and by targets in front of another
engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

from specdec.contract.constraint import Constraint
from specdec.contract.errors import SpecdecError
from specdec.contract.types import TokenIds
from specdec.structured.grammar import invalid
from specdec.structured.known_constraints import KnownConstraints
from specdec.structured.matcher import LegalTokens, Mask, Matcher
from specdec.structured.paced_threads import Pace, PacedThreads

#: Longest processor time that the masks of one step may take. Wall time would end requests on a busy machine.
MAX_MASK_CPU_S = 0.5
#: Time after its beginning at which a computation that has not ended ends its call.
MAX_MASK_S = 10.0


@dataclass(slots=True)
class SessionMatcher:
    """The matcher of a session, with the lock of its owner."""

    constraint_id: bytes = b""
    matcher: Matcher | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Masks that a call needs."""

    constraint: Constraint
    constraint_id: bytes
    output_ids: TokenIds
    """uint32: tokens of the turn's output before the first mask."""
    draft_ids: Sequence[int]
    """Draft tokens; one mask is wanted before each of them and one after the last."""
    end_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class MasksInWork:
    """The masks of a call's next positions."""

    constraint: Constraint
    future: Future[LegalTokens]
    """Fewer masks than positions if a draft token is illegal, or ends the output."""
    pace: Pace
    """Pace of the session."""

    @property
    def is_done(self) -> bool:
        """True once the masks, or an error, are there."""
        return self.future.done()

    @property
    def is_overdue(self) -> bool:
        """True if the masks took so long that their call must end. A wait for a thread does not count."""
        return self.future.running() and time.monotonic() - self.pace.began_s > MAX_MASK_S

    def are_ready(self, patience_s: float) -> bool:
        """Wait for the masks, and return whether they, or an error, are there."""
        wait([self.future], timeout=patience_s)
        return self.future.done()

    async def result(self) -> list[Mask]:
        """Return the masks once they are there.

        Raises:
            InvalidRequest: as `Matcher.mask`, or the masks take too long (CONSTRAINT_INVALID).
        """
        computed = asyncio.wrap_future(self.future)
        try:
            while not self.is_overdue:
                done, _ = await asyncio.wait([computed], timeout=MAX_MASK_S)
                if done:
                    return computed.result().masks
        finally:
            computed.cancel()
        raise too_slow(self.constraint)


class MaskThreads:
    """Computes masks. Use from one thread; the masks are computed in others."""

    def __init__(self, known: KnownConstraints, observe: Callable[[float], None] | None = None) -> None:
        """
        Args:
            known: constraints of the replica.
            observe: receives the seconds that the masks of a call took, from any thread.
        """
        self._known = known
        self._observe = observe
        self._threads = PacedThreads("specdec-masks")

    def begin(self, session: SessionMatcher, request: MaskRequest) -> MasksInWork:
        """Begin to compute the masks of a call with the matcher of its session."""
        future = self._threads.submit(session.pace, self._compute, session, request)
        return MasksInWork(request.constraint, future, session.pace)

    def close(self) -> None:
        """End the threads once their masks are computed."""
        self._threads.close()

    def _compute(self, session: SessionMatcher, request: MaskRequest) -> LegalTokens:
        with session.lock:
            try:
                if session.matcher is None or session.constraint_id != request.constraint_id:
                    session.matcher = Matcher(self._known.table, request.constraint)
                    session.constraint_id = request.constraint_id
                began_cpu_s = time.thread_time()
                try:
                    session.matcher.align(request.output_ids)
                    check = partial(_check_time, request.constraint, began_cpu_s)
                    return session.matcher.legal_along(request.draft_ids, request.end_token_ids, check)
                finally:
                    if self._observe is not None:
                        self._observe(time.thread_time() - began_cpu_s)
            except BaseException:
                session.matcher = None  # after an error its state is unknown
                raise


def _check_time(constraint: Constraint, began_cpu_s: float) -> None:
    """Raise InvalidRequest if this thread has computed masks for too long."""
    if time.thread_time() - began_cpu_s > MAX_MASK_CPU_S:
        raise too_slow(constraint)


def too_slow(constraint: Constraint) -> SpecdecError:
    """Return the error for masks that take too long."""
    return invalid(constraint, f"takes more than {MAX_MASK_CPU_S:g} s for the legal tokens of a step; simplify it")
