"""Masks of constrained calls, computed in threads beside the forward pass.

    begin: the step will answer the call ─▶ forward pass ─▶ collect ─┬▶ ready: the program applies them
                                                                     ├▶ late: the call misses the step
                                                                     └▶ failed: the call ends with an error

A call whose masks were late once waits for them before each further step, so other calls never wait for it. Called by
`steps` and `draft_steps` on the device thread; `specdec.structured.mask_threads` computes the masks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import wait

import numpy as np

from specdec.contract.errors import Internal, SpecdecError
from specdec.engine.base import StepObserver
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.loop.job import Job, Program
from specdec.structured.known_constraints import KnownConstraints
from specdec.structured.mask_threads import MaskRequest, MaskThreads, SessionMatcher, too_slow
from specdec.structured.matcher import Mask, is_legal, no_legal_token

#: Time for which a step that has ended waits for masks.
_PATIENCE_S = 0.0005
#: Time for which the device thread waits for masks while no call can run, before it looks for new calls.
_IDLE_WAIT_S = 0.001

_log = logging.getLogger(__name__)


class ConstraintMasks:
    """Computes the masks of one replica's calls."""

    def __init__(
        self, program: Program, known: KnownConstraints | None = None, observer: StepObserver | None = None
    ) -> None:
        """
        Args:
            program: tells the tokens that masks follow.
            known: constraints of the replica; None if its calls have none.
            observer: receives the time of masks.
        """
        self._program = program
        self._known = known
        self._observer = observer
        self._threads: MaskThreads | None = None

    def runnable(self, jobs: Iterable[Job]) -> list[Job]:
        """Return the jobs that the next step may run: all but those that wait for their masks."""
        runnable = []
        for job in jobs:
            if job.waits_for_masks:
                self._begin(job)
            if not job.waits_for_masks or _is_ready(job):
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
            if job.masks is None:
                ready.append(job)
            elif job.masks.is_done:
                error = job.masks.future.exception()
                if error is None:
                    ready.append(job)
                else:
                    failed.append((job, _as_answer(job, error)))
            elif job.masks.is_overdue:
                failed.append((job, too_slow(job.masks.constraint)))
            else:
                job.waits_for_masks = True
                late.append(job)
        return ready, late, failed

    def close(self) -> None:
        """End the threads once their masks are computed."""
        if self._threads is not None:
            self._threads.close()

    def _begin(self, job: Job) -> None:
        constraint = job.call.constraint
        if job.masks is not None or constraint is None:
            return
        if self._threads is None:
            assert self._known is not None  # a call with a constraint was admitted by its text
            observe = None if self._observer is None else self._observer.observe_masks
            self._threads = MaskThreads(self._known, observe)
        filters = job.call.position.filters
        session = job.sequence.matcher = job.sequence.matcher or SessionMatcher()
        output_ids, draft_ids = self._program.masked_tokens(job)
        request = MaskRequest(constraint, filters.constraint_id, output_ids, draft_ids, filters.end_token_ids)
        job.masks = self._threads.begin(session, request)


def _is_ready(job: Job) -> bool:
    """Return whether a step need not wait for the job's masks: they are there, or too late."""
    return job.masks is None or job.masks.is_done or job.masks.is_overdue


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
        for row, mask in zip(rows, job.masks.future.result().masks, strict=False):
            if not is_legal(mask, logits.top_ids[row]) and not _has_token(mask, logits, row):
                found.append((job, no_legal_token(job.call.constraint)))
                break
    return found


def _has_token(mask: Mask, logits: StepLogits, row: int) -> bool:
    values = logits.values[row].cpu().numpy()
    allowed = np.unpackbits(mask, count=len(values), bitorder="little").view(np.bool_)
    return bool((values[allowed] > -np.inf).any())


def _as_answer(job: Job, error: BaseException) -> SpecdecError:
    """Return the error for the job whose masks failed; other jobs go on."""
    if isinstance(error, SpecdecError):
        return error
    job.call.context.run(_log.error, "masks of a constraint failed", exc_info=error)
    return Internal("the masks of the constraint could not be computed")
