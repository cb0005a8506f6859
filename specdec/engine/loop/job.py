"""A running call, and the contract of the program that serves it.

A job runs the tokens of its sequence. When all of them have KV, the program gets the logits of the last
`num_logit_rows` tokens and either appends a token, which takes one more step, or finishes the job.

The worker gets tokens as slices of a step; the program gets their logits as `specdec.engine.logits.step_logits`. Called
by the loop's modules and by the programs of both services.
"""

from __future__ import annotations

import collections.abc
import itertools
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
import torch

from specdec.contract.errors import Unsupported
from specdec.contract.types import BLOCK_TOKENS, ProposeRequest, SessionPosition, Stages, TokenIds
from specdec.engine.base import MultiStepDrafts, SequenceSlice, SliceStates, StepPlan, Worker
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.sessions.block_manager import blocks_for
from specdec.engine.sessions.calls import Call
from specdec.engine.sessions.sequence import Sequence
from specdec.structured.mask_threads import MasksInWork
from specdec.structured.matcher import Mask


class RowKind(Enum):
    """Way of sampling a round's tokens; rows of one kind are sampled in one batch."""

    GREEDY = auto()
    COUPLED = auto()
    DISTRIBUTION = auto()


def row_kind(request: SessionPosition) -> RowKind:
    """Return the kind of a round's rows: greedy at temperature 0, whatever the draw rule."""
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
        """Tokens of the newest step that the job took part in, other sessions' included; it began at `step_began_s`."""
        self.num_cached_tokens = 0
        """Number of committed tokens that needed no forward pass; set when the job starts to run."""
        self.local_draft = call.local_draft
        """Local draft that the job still has to make; "" once it is made, or for none."""
        self.draft_s = 0.0
        """Seconds that drafting took, with other sessions' steps in between."""
        self._draft_began_s: float | None = None
        self.progress: Any = None
        """State of the program between steps."""
        self.answer: Any = None
        """Set by `finish`."""
        self._step_answers: list[Any] = []
        self.committed_len = call.position.committed_len
        """Number of committed tokens; a renewal of a run raises it."""
        self.masks: MasksInWork | None = None
        """Masks of the next logit rows; None if the call has no constraint, or they are not begun."""
        self.waits_for_masks = False
        """True once masks were late: further steps run after their masks are ready."""
        self.until = 0 if call.run is None else call.run.until
        """Largest number of tokens that the session may hold in a run."""

    @property
    def has_run(self) -> bool:
        """True once a step has taken the job."""
        return self._first_step_s is not None

    @property
    def queue_s(self) -> float:
        """Seconds from the call's arrival to its first step; to its admission if its answer needed no step."""
        return (self._admitted_s if self._first_step_s is None else self._first_step_s) - self._arrival_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call arrived."""
        return self._clock() - self._arrival_s

    @property
    def step_s(self) -> float:
        """Seconds since the newest step began."""
        return self._clock() - self.step_began_s

    @property
    def stages(self) -> Stages | None:
        """Times of the call's stages up to now, if it asks for them; read when the answer is made."""
        if not self.call.position.is_timed:
            return None
        first_step_s = self._admitted_s if self._first_step_s is None else self._first_step_s
        return Stages(self._admitted_s, first_step_s, self._clock())

    @property
    def kv_len(self) -> int:
        """Number of tokens with KV."""
        return self.sequence.kv_len

    @property
    def num_pending(self) -> int:
        """Number of tokens without KV."""
        return self.sequence.num_pending

    @property
    def token_ids(self) -> TokenIds:
        """uint32: all tokens of the sequence, with draft tokens; valid until the next `append`."""
        return self.sequence.token_ids

    @property
    def round_start(self) -> int:
        """Number of tokens before the positions whose logits are needed next, which begin a round."""
        return len(self.sequence) - self.num_logit_rows + 1

    def append(self, token_id: int) -> None:
        """Run `token_id` next; the program then gets its logits."""
        self._append_all([token_id])

    def _append_all(self, token_ids: list[int]) -> None:
        self.sequence.append(np.array(token_ids, dtype=np.uint32))
        self.num_logit_rows = len(token_ids)
        self.masks = None

    def mask_of(self, index: int) -> Mask | None:
        """Return the mask of the logit row `index`; None if all tokens are legal, or a draft token before it is not."""
        masks = () if self.masks is None else self.masks.future.result().masks
        return masks[index] if index < len(masks) else None

    def miss_step(self) -> None:
        """Run the tokens of the logit rows again: the step came before their masks."""
        self.sequence.run_again(self.num_logit_rows)

    def next_slice(self, num_tokens: int, num_logit_rows: int) -> SequenceSlice:
        """Return the next `num_tokens` tokens that have not run as a slice of a step."""
        call, end = self.call, self.kv_len + num_tokens
        planned = self.sequence.plan_states(
            end,
            self.committed_len if call.run is None else end,
            call.position.output_start,
            goes_on=isinstance(call.request, ProposeRequest),
        )
        states = None if planned is None else SliceStates(*planned)
        return slice_of(self.sequence, num_tokens, num_logit_rows, states)

    def note_step(self, began_s: float, num_tokens: int) -> None:
        """Note a step that the job took part in: its begin, and its tokens with those of other sessions."""
        self.step_began_s, self.step_tokens = began_s, num_tokens
        if self._first_step_s is None:
            self._first_step_s = began_s

    def begin_draft(self) -> None:
        """Note that the first draft step begins; later calls have no effect."""
        if self._draft_began_s is None:
            self._draft_began_s = self._first_step_s = self._clock()

    def end_draft(self) -> None:
        """End the local draft: its tokens run next, and the program gets the logits of all pending tokens."""
        self.local_draft = ""
        self.masks = None
        self.num_logit_rows = 1 + len(self.sequence) - self.call.position.committed_len
        if self._draft_began_s is not None:
            self.draft_s = self._clock() - self._draft_began_s

    def finish(self, answer: Any) -> None:
        """End the job; `answer` is stored under the idempotency key and sent to all waiters."""
        self.answer = answer

    def conclude(self, answers: collections.abc.Sequence[Any], token_ids: collections.abc.Sequence[int]) -> None:
        """Finish the job; a run goes on with the decided tokens instead, unless it ends with one of them.

        Args:
            answers: the call's only answer; of a run, the answers of its steps, one a logit row.
            token_ids: token that each row decided.
        """
        run = self.call.run
        if run is None:
            self.finish(answers[0])
            return
        num_steps = self._num_decided(token_ids)
        *self._step_answers, newest = answers[:num_steps]
        if num_steps < self.num_logit_rows or token_ids[-1] in run.end_token_ids or self._room < 1:
            self.finish(newest)
            return
        self._step_answers.append(newest)
        self.num_cached_tokens = len(self.sequence)
        self._append_all([token_ids[-1], *self._forced_after(token_ids[-1])])

    def take_step_answers(self) -> list[Any]:
        """Return the answers of a run's newest steps, without its last answer."""
        answers, self._step_answers = self._step_answers, []
        return answers

    def _num_decided(self, token_ids: collections.abc.Sequence[int]) -> int:
        """Return the number of rows that stand: all, unless a row decided another token than the forced one that ran.

        The mask has no other token, so this is a safeguard: the run ends, and the next call rolls back.
        """
        ran = self.token_ids[self.round_start :].tolist()
        return next((row + 1 for row, ran_id in enumerate(ran) if token_ids[row] != ran_id), self.num_logit_rows)

    @property
    def _room(self) -> int:
        """Number of further tokens that a run may decide and run in the next step."""
        length = len(self.sequence)
        return min(self.until - length - 1, len(self.sequence.block_table) * BLOCK_TOKENS - length)

    def _forced_after(self, token_id: int) -> list[int]:
        """Return the tokens that the constraint forces after the decided one, as far as they run in the same step."""
        forced = [] if self.masks is None else self.masks.future.result().forced[: self._room]
        assert self.call.run is not None  # the caller has checked it
        if forced[:1] != [token_id]:
            return []
        ends = self.call.run.end_token_ids
        return list(itertools.takewhile(lambda each: each not in ends, forced[1:]))

    def renew(self, until: int, committed_len: int) -> None:
        """Raise the limit of a run and its committed length. Smaller values have no effect, nor has a renewal that
        states more committed tokens than there are."""
        if committed_len <= len(self.sequence):
            self.until = max(self.until, until)
            self.committed_len = max(self.committed_len, committed_len)


def slice_of(
    sequence: Sequence, num_tokens: int, num_logit_rows: int, states: SliceStates | None = None
) -> SequenceSlice:
    """Return the next `num_tokens` tokens that have not run as a slice of a step."""
    start, end = sequence.kv_len, sequence.kv_len + num_tokens
    return SequenceSlice(
        token_ids=tuple(sequence.token_ids[start:end].tolist()),
        start=start,
        block_table=sequence.block_table.first(blocks_for(end)),
        num_logit_rows=num_logit_rows,
        states=states,
        table=sequence.block_table,
    )


def draft_slice_of(job: Job) -> SequenceSlice:
    """Return the last token of a drafting job as a slice of a draft step; the sequence's own KV ends before it."""
    last = len(job.sequence) - 1
    return SequenceSlice(
        token_ids=(int(job.sequence.token_ids[last]),),
        start=last,
        block_table=tuple(job.sequence.block_table[: blocks_for(last + 1)]),
        num_logit_rows=1,
        draft_index=last + 1 - job.call.position.committed_len,
    )


def split_non_finite(jobs: list[Job], logits: torch.Tensor) -> tuple[list[Job], list[Job], StepLogits]:
    """Separate the jobs with a logit row that gives no distribution: NaN, infinite, or -inf throughout.

    Args:
        jobs: jobs whose tokens have all run.
        logits: float32 [R, V]; the rows of job after job, `num_logit_rows` each.

    Returns:
        The jobs with finite logits, the other jobs, and the rows of the finite ones.
    """
    read = StepLogits.read(logits)
    is_finite = read.is_finite
    if all(is_finite):
        return jobs, [], read
    kept: list[Job] = []
    non_finite: list[Job] = []
    first = 0
    for job in jobs:
        own = range(first, first + job.num_logit_rows)
        first = own.stop
        (kept if all(is_finite[row] for row in own) else non_finite).append(job)
    return kept, non_finite, rows_of(jobs, kept, read)


def rows_of(jobs: Iterable[Job], kept: collections.abc.Sequence[Job], logits: StepLogits) -> StepLogits:
    """Return the rows of some jobs.

    Args:
        jobs: jobs whose rows are `logits`, `num_logit_rows` each.
        kept: some of them, in the same order.
        logits: the rows of job after job.
    """
    wanted, rows, first = set(kept), list[int](), 0
    for job in jobs:
        if job in wanted:
            rows += range(first, first + job.num_logit_rows)
        first += job.num_logit_rows
    return logits.select(rows)


class MultiStepDraft(Protocol):
    """Draft tokens of several consecutive steps, sampled if the logits are and read once, at the end."""

    num_steps: int

    def run_on(self, worker: Worker, plan: StepPlan) -> bool:
        """Run the steps, the first of them `plan` with one slice a job, and wait for their tokens.

        Returns:
            False if the worker cannot; then nothing was run.
        """
        ...

    def take(
        self, index: int, jobs: collections.abc.Sequence[Job]
    ) -> tuple[collections.abc.Sequence[Job], collections.abc.Sequence[Job]]:
        """Give jobs their tokens of one step and finish or continue them, as `Program.advance` does.

        Returns:
            The jobs with non-finite logits, which got no token, and the jobs whose token the next step ran.
        """
        ...


class Program(Protocol):
    """A service's use of logits: the only place where draft and target differ."""

    masks_own_rows: bool = False
    """True if masks are for other tokens than the rows of logits: the program looks for legal tokens itself."""

    def advance(self, jobs: collections.abc.Sequence[Job], logits: StepLogits) -> None:
        """Append a token to every job, or finish it. Runs on the device thread.

        Args:
            jobs: jobs whose tokens have all run.
            logits: the rows of job after job, `num_logit_rows` each.
        """
        ...

    def masked_tokens(self, job: Job) -> tuple[TokenIds, list[int]]:
        """Return what the masks of a job's next logit rows depend on, in the vocabulary of its constraint.

        Returns:
            Tokens of the turn's output before the rows, and the draft tokens of the rows.
        """
        token_ids, first = job.token_ids, job.round_start
        return token_ids[job.call.position.output_start : first].copy(), token_ids[first:].tolist()

    def multi_step_draft(self, jobs: collections.abc.Sequence[Job], kind: MultiStepDrafts) -> MultiStepDraft | None:
        """Return a multi-step draft of the jobs' next tokens; None if it is impossible or has only one step.

        Args:
            jobs: jobs of the next step, a row each.
            kind: multi-step drafts that the worker can run.
        """
        return None

    def draft(self, jobs: collections.abc.Sequence[Job], logits: StepLogits) -> None:
        """Append a token to the local draft of every job, and end or continue the draft.

        Args:
            jobs: jobs with a `local_draft` that took part in a draft step.
            logits: a row a job.
        """
        raise Unsupported("this program makes no local drafts")
