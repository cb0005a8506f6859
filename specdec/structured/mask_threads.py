"""Threads that compute the masks of calls, so that no slow constraint delays other sessions.

Each session keeps its matcher from call to call. The time of masks is limited, and a call whose masks take longer ends
by name. Called by the device loop of our own engine (`specdec.engine.loop.constraint_masks`) and by targets in front of
another engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from specdec.contract.constraint import Constraint
from specdec.contract.errors import SpecdecError
from specdec.contract.types import TokenIds
from specdec.structured.grammar import invalid
from specdec.structured.known_constraints import KnownConstraints
from specdec.structured.matcher import Mask, Matcher

#: Longest processor time that the masks of one step may take. Wall time would end requests on a busy machine.
MAX_MASK_CPU_S = 0.5
#: Time after which masks that are still not ready end their call.
MAX_MASK_S = 10.0
#: Threads that compute masks. A slow constraint occupies one of them.
_NUM_THREADS = 4


@dataclass(slots=True)
class SessionMatcher:
    """The matcher of a session, with the lock of its owner."""

    constraint_id: bytes = b""
    matcher: Matcher | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


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
    future: Future[list[Mask]]
    """Fewer masks than positions if a draft token is illegal, or ends the output."""
    began_s: float
    """Time at which the computation was asked for, by `time.monotonic`."""

    @property
    def is_done(self) -> bool:
        """True once the masks, or an error, are there."""
        return self.future.done()

    @property
    def is_overdue(self) -> bool:
        """True if the masks took so long that their call must end."""
        return time.monotonic() - self.began_s > MAX_MASK_S

    def are_ready(self, patience_s: float) -> bool:
        """Wait for the masks, and return whether they, or an error, are there."""
        wait([self.future], timeout=patience_s)
        return self.future.done()

    async def result(self) -> list[Mask]:
        """Return the masks once they are there.

        Raises:
            InvalidRequest: as `Matcher.mask`, or the masks take too long (CONSTRAINT_INVALID).
        """
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.future), MAX_MASK_S)
        except TimeoutError as error:
            raise too_slow(self.constraint) from error


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
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="specdec-masks")

    def begin(self, session: SessionMatcher, request: MaskRequest) -> MasksInWork:
        """Begin to compute the masks of a call with the matcher of its session."""
        future = self._pool.submit(self._compute, session, request)
        return MasksInWork(request.constraint, future, time.monotonic())

    def close(self) -> None:
        """End the threads once their masks are computed."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compute(self, session: SessionMatcher, request: MaskRequest) -> list[Mask]:
        with session.lock:
            try:
                if session.matcher is None or session.constraint_id != request.constraint_id:
                    session.matcher = Matcher(self._known.table, request.constraint)
                    session.constraint_id = request.constraint_id
                began_s = time.thread_time()
                session.matcher.align(request.output_ids)
                masks = session.matcher.masks_along(request.draft_ids, request.end_token_ids)
                mask_s = time.thread_time() - began_s
                if self._observe is not None:
                    self._observe(mask_s)
                if mask_s > MAX_MASK_CPU_S:
                    raise too_slow(request.constraint)
                return masks
            except BaseException:
                session.matcher = None  # after an error its state is unknown
                raise


def too_slow(constraint: Constraint) -> SpecdecError:
    """Return the error for masks that take too long."""
    return invalid(constraint, f"takes more than {MAX_MASK_CPU_S:g} s for the legal tokens of a step; simplify it")
