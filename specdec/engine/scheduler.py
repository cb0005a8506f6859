"""Which tokens of which sessions run in the next step.

Every step is one ragged batch. Sequences that are nearly done (draft steps, verification rows, a short delta) go
first, whole, least recently served first; long ones (prefill) then share what is left of the token budget in order of
arrival, and a fixed share is theirs even when the others could fill the step.

Not here: tensors, KV blocks (reserved before a job gets here), waiting for blocks. Called by `loop`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from specdec.types import BLOCK_TOKENS

DEFAULT_MAX_STEP_TOKENS = 512

#: One part in this many of a step's budget is for prefill chunks whenever there are any.
_PREFILL_SHARE = 4


class Schedulable(Protocol):
    """What the scheduler must know of a job. Jobs are given in order of arrival."""

    num_logit_rows: int
    """Rows wanted for the last tokens; they must run in one step."""
    last_step: int
    """The step that served it last; at first `Scheduler.num_steps` at its arrival. Set by `plan_chunks`."""

    @property
    def num_pending(self) -> int:
        """Tokens to run; at least `num_logit_rows`."""
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one job."""

    job_index: int
    num_tokens: int
    num_logit_rows: int


class Scheduler:
    """Plans step after step; remembers only how many steps there were."""

    def __init__(self, max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS) -> None:
        self._max_step_tokens = max_step_tokens
        self._prefill_share = max(1, max_step_tokens // _PREFILL_SHARE)
        self.num_steps = 0

    def plan_chunks(self, jobs: Iterable[Schedulable]) -> list[Chunk]:
        """Chooses the chunks of the next step; empty only when there is no job.

        A step exceeds the token budget only when one job's logit-bearing tail alone does.
        """
        indexed = list(enumerate(jobs))
        short = [(index, job) for index, job in indexed if is_short(job)]
        long = [(index, job) for index, job in indexed if not is_short(job)]
        prefill_share = min(self._prefill_share, sum(job.num_pending for _, job in long))
        chunks: list[Chunk] = []
        budget = self._max_step_tokens - prefill_share
        for index, job in sorted(short, key=lambda entry: entry[1].last_step):
            if job.num_pending > budget and chunks:
                break  # and not a smaller one behind it, which would let it wait for ever
            chunks.append(Chunk(index, job.num_pending, job.num_logit_rows))
            budget -= job.num_pending
        budget += prefill_share
        for index, job in long:
            num_tokens = _prefill_tokens(job, budget)
            if num_tokens <= 0:
                break
            chunks.append(Chunk(index, num_tokens, job.num_logit_rows if num_tokens == job.num_pending else 0))
            budget -= num_tokens
        self.num_steps += 1
        for chunk in chunks:
            indexed[chunk.job_index][1].last_step = self.num_steps
        return chunks


def is_short(job: Schedulable) -> bool:
    """Whether a job runs whole in one step, ahead of prefill: at most a block of tokens before its logit rows."""
    return job.num_pending <= BLOCK_TOKENS + job.num_logit_rows


def _prefill_tokens(job: Schedulable, budget: int) -> int:
    """Tokens of `job` to run within `budget`: all, or as many as leave the logit-bearing tail whole."""
    if job.num_pending <= budget:
        return job.num_pending
    return min(budget, job.num_pending - job.num_logit_rows)
