"""One call being worked on, and what a service's program does with it.

A job is run by running its sequence's tokens: whenever all of them have KV, the program gets the logits of the last
`num_logit_rows` tokens and either appends a token (one more step) or finishes.

Tokens go from here, as slices of a step, to the worker; their logits, as `specdec.engine.logits.step_logits`, to the
service's program.

Not here: futures and threads (`device_loop`), the choice of steps (`specdec.engine.schedule.scheduler`). Called by the
loop's modules and the two programs.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
import torch

from specdec.engine.base import MultiStepDrafts, SequenceSlice, StepPlan, Worker
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.sessions.block_manager import blocks_for
from specdec.engine.sessions.calls import Call
from specdec.engine.sessions.sequence import Sequence
from specdec.errors import Unsupported
from specdec.types import SessionPosition, Stages, TokenIds


class RowKind(Enum):
    """How a round's tokens are drawn; rows of one kind are drawn in one batch."""

    GREEDY = auto()
    COUPLED = auto()
    DISTRIBUTION = auto()


def row_kind(request: SessionPosition) -> RowKind:
    """Greedy whenever the temperature is 0, whatever the draw rule."""
    if request.filters.is_greedy:
        return RowKind.GREEDY
    return RowKind.DISTRIBUTION if request.carries_distributions else RowKind.COUPLED


class Job:
    """A call with its sequence. Lives on the device thread."""

    def __init__(
        self, call: Call, sequence: Sequence, *, arrival_step: int, arrival_s: float, clock: Callable[[], float]
    ) -> None:
        self.call = call
        self.sequence = sequence
        self.num_logit_rows = call.num_logit_rows
        self.last_step = arrival_step
        self._arrival_s = arrival_s
        self._clock = clock
        self._admitted_s = clock()
        self._first_step_s: float | None = None
        self.step_began_s = arrival_s
        self.step_tokens = 0
        """Of the newest step it took part in: when that began, and its tokens, other sessions' included."""
        self.num_cached_tokens = 0
        """Committed tokens that needed no forward pass; set when the job starts to run."""
        self.local_draft = call.local_draft
        """What it drafts with by itself, until it has its draft; "" from then on."""
        self.draft_s = 0.0
        """What drafting took, others' steps in between included."""
        self._draft_began_s: float | None = None
        self.progress: Any = None
        """The program's own notes between steps."""
        self.answer: Any = None
        """Set by `finish`."""

    @property
    def elapsed_s(self) -> float:
        """Time since the call came in."""
        return self._clock() - self._arrival_s

    @property
    def step_s(self) -> float:
        """Time since the newest step began."""
        return self._clock() - self.step_began_s

    @property
    def stages(self) -> Stages | None:
        """When what was done, where the call asks; its answer is made now."""
        if not self.call.position.is_timed:
            return None
        first_step_s = self._admitted_s if self._first_step_s is None else self._first_step_s
        return Stages(self._admitted_s, first_step_s, self._clock())

    @property
    def kv_len(self) -> int:
        """Tokens that have KV now."""
        return self.sequence.kv_len

    @property
    def num_pending(self) -> int:
        return self.sequence.num_pending

    @property
    def token_ids(self) -> TokenIds:
        """uint32: every token of the sequence, drafts included; valid until the next `append`."""
        return self.sequence.token_ids

    def append(self, token_id: int) -> None:
        """Runs `token_id` next and comes back with its logits."""
        self.sequence.append(np.array([token_id], dtype=np.uint32))
        self.num_logit_rows = 1

    def note_step(self, began_s: float, num_tokens: int) -> None:
        """It took part in a step that began then, of so many tokens, other sessions' included."""
        self.step_began_s, self.step_tokens = began_s, num_tokens
        if self._first_step_s is None:
            self._first_step_s = began_s

    def begin_draft(self) -> None:
        """Its first draft step begins now; of several calls, the first counts."""
        if self._draft_began_s is None:
            self._draft_began_s = self._first_step_s = self._clock()

    def end_draft(self) -> None:
        """Runs its tokens next, committed and drafted, and comes back with the logits of all that are pending."""
        self.local_draft = ""
        self.num_logit_rows = 1 + len(self.sequence) - self.call.position.committed_len
        if self._draft_began_s is not None:
            self.draft_s = self._clock() - self._draft_began_s

    def finish(self, answer: Any) -> None:
        """Ends the job; `answer` is stored under the idempotency key and sent to whoever waits."""
        self.answer = answer


def slice_of(sequence: Sequence, num_tokens: int, num_logit_rows: int) -> SequenceSlice:
    """The next `num_tokens` tokens without KV, as a part of a step."""
    start, end = sequence.kv_len, sequence.kv_len + num_tokens
    return SequenceSlice(
        token_ids=tuple(sequence.token_ids[start:end].tolist()),
        start=start,
        block_table=sequence.block_table.first(blocks_for(end)),
        num_logit_rows=num_logit_rows,
        table=sequence.block_table,
    )


def draft_slice_of(job: Job) -> SequenceSlice:
    """The last token of a job that drafts, as a part of a draft step; the sequence's own KV ends before it."""
    last = len(job.sequence) - 1
    return SequenceSlice(
        token_ids=(int(job.sequence.token_ids[last]),),
        start=last,
        block_table=tuple(job.sequence.block_table[: blocks_for(last + 1)]),
        num_logit_rows=1,
        draft_index=last + 1 - job.call.position.committed_len,
    )


def split_non_finite(jobs: list[Job], logits: torch.Tensor) -> tuple[list[Job], list[Job], StepLogits]:
    """Takes out the jobs with a logit row that no distribution can be made of: NaN, infinite, or -inf throughout.

    Args:
        jobs: those whose tokens have all run.
        logits: float32 [R, V]; the rows of job after job, `num_logit_rows` each.

    Returns:
        The jobs that stay, the others, and the rows of those that stay.
    """
    read = StepLogits.read(logits)
    is_finite = read.is_finite
    if all(is_finite):
        return jobs, [], read
    kept: list[Job] = []
    non_finite: list[Job] = []
    rows: list[int] = []
    first = 0
    for job in jobs:
        own = range(first, first + job.num_logit_rows)
        first = own.stop
        if all(is_finite[row] for row in own):
            kept.append(job)
            rows += own
        else:
            non_finite.append(job)
    return kept, non_finite, read.select(rows)


class MultiStepDraft(Protocol):
    """Draft tokens of several steps in a row, drawn where the logits are; read once, at the end."""

    num_steps: int

    def run_on(self, worker: Worker, plan: StepPlan) -> bool:
        """Runs them, the first of them `plan`, of a slice a job, and waits for what was drawn.

        Returns:
            False where the worker cannot; nothing was run then.
        """
        ...

    def take(
        self, index: int, jobs: collections.abc.Sequence[Job]
    ) -> tuple[collections.abc.Sequence[Job], collections.abc.Sequence[Job]]:
        """Gives jobs their tokens of one step, and ends them or goes on, as `Program.advance` does.

        Returns:
            The jobs whose logits no distribution can be made of, which got nothing; and those that the next step ran
            their token for.
        """
        ...


class Program(Protocol):
    """What a service does with logits: the only place where draft and target differ."""

    def advance(self, jobs: collections.abc.Sequence[Job], logits: StepLogits) -> None:
        """Appends a token to every job or finishes it. Runs on the device thread.

        Args:
            jobs: those whose tokens have all run.
            logits: the rows of job after job, `num_logit_rows` each.
        """
        ...

    def multi_step_draft(self, jobs: collections.abc.Sequence[Job], kind: MultiStepDrafts) -> MultiStepDraft | None:
        """How the next tokens of jobs can be drawn in steps that follow one another; None: not so, or it is only one.

        Args:
            jobs: those of the next step, a row each.
            kind: which steps the worker runs so.
        """
        return None

    def draft(self, jobs: collections.abc.Sequence[Job], logits: StepLogits) -> None:
        """Appends a token to the draft of every job, and ends that or goes on. Only of calls with a `local_draft`.

        Args:
            jobs: those that took part in a draft step.
            logits: a row a job.
        """
        raise Unsupported("this program drafts nothing")
