"""Masks of constrained calls, computed in threads beside the forward pass.

    begin: the step will answer the call ─▶ forward pass ─▶ collect ─┬▶ ready: the program applies them
                                                                     ├▶ late: the call misses the step
                                                                     └▶ failed: the call ends with an error

A call whose masks were late once waits for them before each further step, so other calls never wait for it. Called by
`steps` on the device thread; `specdec.structured` computes the masks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from specdec.contract.constraint import Constraint
from specdec.contract.errors import Internal, SpecdecError
from specdec.contract.types import TokenIds
from specdec.engine.base import StepObserver
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.loop.job import Job, MasksInWork
from specdec.structured.grammar import invalid
from specdec.structured.known_constraints import KnownConstraints
from specdec.structured.matcher import Mask, Matcher, is_legal, no_legal_token

#: Time for which a step that has ended waits for masks.
_PATIENCE_S = 0.0005
#: Time for which the device thread waits for masks while no call can run, before it looks for new calls.
_IDLE_WAIT_S = 0.001
#: Longest processor time that the masks of one step may take. Wall time would end requests on a busy machine.
MAX_MASK_CPU_S = 0.5
#: Time after which masks that are still not ready end their call.
_MAX_MASK_S = 10.0
#: Threads that compute masks. A slow constraint occupies one of them.
_NUM_THREADS = 4

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SessionMatcher:
    """The matcher of a session, with the lock of its owner."""

    constraint_id: bytes = b""
    matcher: Matcher | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class ConstraintMasks:
    """Computes the masks of one replica's calls."""

    def __init__(self, known: KnownConstraints | None = None, observer: StepObserver | None = None) -> None:
        """
        Args:
            known: constraints of the replica; None if its calls have none.
            observer: receives the time of masks.
        """
        self._known = known
        self._observer = observer
        self._pool: ThreadPoolExecutor | None = None

    def runnable(self, jobs: Iterable[Job]) -> list[Job]:
        """Return the jobs that the next step may run: all but those that wait for their masks."""
        runnable = []
        for job in jobs:
            if job.waits_for_masks:
                self._begin(job)
            if not job.waits_for_masks or _is_done(job) or _is_overdue(job):
                runnable.append(job)
        return runnable

    def wait(self, jobs: Iterable[Job]) -> None:
        """Wait a moment for the masks of jobs, none of which can run without."""
        wait([job.masks.future for job in jobs if job.masks is not None], timeout=_IDLE_WAIT_S)

    def begin(self, jobs: Iterable[Job]) -> None:
        """Begin the masks of the constrained ones of the jobs that the step answers."""
        for job in jobs:
            if job.call.constraint is not None:
                self._begin(job)

    def collect(self, jobs: Iterable[Job]) -> tuple[list[Job], list[Job], list[tuple[Job, SpecdecError]]]:
        """Return the jobs with their masks or without a constraint, the late ones, and those whose masks failed."""
        wait([job.masks.future for job in jobs if job.masks is not None], timeout=_PATIENCE_S)
        ready: list[Job] = []
        late: list[Job] = []
        failed: list[tuple[Job, SpecdecError]] = []
        for job in jobs:
            if _is_done(job):
                error = None if job.masks is None else job.masks.future.exception()
                if error is None:
                    ready.append(job)
                else:
                    failed.append((job, _as_answer(job, error)))
            elif _is_overdue(job):
                failed.append((job, _too_slow(job.call.constraint)))
            else:
                job.waits_for_masks = True
                late.append(job)
        return ready, late, failed

    def close(self) -> None:
        """End the threads once their masks are computed."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, job: Job) -> None:
        constraint = job.call.constraint
        if job.masks is not None or constraint is None:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="specdec-masks")
        position, token_ids, first = job.call.position, job.token_ids, job.round_start
        session = job.sequence.matcher = job.sequence.matcher or SessionMatcher()
        future = self._pool.submit(
            self._compute,
            session,
            constraint,
            position.filters.constraint_id,
            token_ids[position.output_start : first].copy(),
            token_ids[first:].tolist(),
            position.filters.end_token_ids,
        )
        job.masks = MasksInWork(future, time.monotonic())

    def _compute(
        self,
        session: SessionMatcher,
        constraint: Constraint,
        constraint_id: bytes,
        output_ids: TokenIds,
        draft_ids: Sequence[int],
        end_token_ids: Sequence[int],
    ) -> list[Mask]:
        assert self._known is not None  # a call with a constraint was admitted by its text
        with session.lock:
            try:
                if session.matcher is None or session.constraint_id != constraint_id:
                    session.matcher = Matcher(self._known.table, constraint)
                    session.constraint_id = constraint_id
                began_s = time.thread_time()
                session.matcher.align(output_ids)
                masks = session.matcher.masks_along(draft_ids, end_token_ids)
                mask_s = time.thread_time() - began_s
                if self._observer is not None:
                    self._observer.observe_masks(mask_s)
                if mask_s > MAX_MASK_CPU_S:
                    raise _too_slow(constraint)
                return masks
            except BaseException:
                session.matcher = None  # after an error its state is unknown
                raise


def rows_without_token(jobs: Sequence[Job], logits: StepLogits) -> list[tuple[Job, SpecdecError]]:
    """Return the constrained jobs with a row in which every legal token is impossible for the model.

    Args:
        jobs: jobs that have their masks.
        logits: the rows of job after job, `num_logit_rows` each.
    """
    found: list[tuple[Job, SpecdecError]] = []
    first = 0
    for job in jobs:
        rows = range(first, first + job.num_logit_rows)
        first = rows.stop
        if job.masks is None or job.call.constraint is None:
            continue
        for row, mask in zip(rows, job.masks.future.result(), strict=False):
            if not is_legal(mask, logits.top_ids[row]) and not _has_token(mask, logits, row):
                found.append((job, no_legal_token(job.call.constraint)))
                break
    return found


def _has_token(mask: Mask, logits: StepLogits, row: int) -> bool:
    values = logits.values[row].cpu().numpy()
    allowed = np.unpackbits(mask, count=len(values), bitorder="little").view(np.bool_)
    return bool((values[allowed] > -np.inf).any())


def _is_done(job: Job) -> bool:
    return job.masks is None or job.masks.future.done()


def _is_overdue(job: Job) -> bool:
    return job.masks is not None and time.monotonic() - job.masks.began_s > _MAX_MASK_S


def _as_answer(job: Job, error: BaseException) -> SpecdecError:
    """Return the error for the job whose masks failed; other jobs go on."""
    if isinstance(error, SpecdecError):
        return error
    job.call.context.run(_log.error, "masks of a constraint failed", exc_info=error)
    return Internal("the masks of the constraint could not be computed")


def _too_slow(constraint: Constraint | None) -> SpecdecError:
    assert constraint is not None
    return invalid(constraint, f"takes more than {MAX_MASK_CPU_S:g} s for the legal tokens of a step; simplify it")
