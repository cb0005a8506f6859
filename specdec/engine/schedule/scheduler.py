"""Which tokens of which sessions run in the next step.

A round comes here once its blocks are reserved; the chunks that are planned go into a step plan for the worker
(`specdec.engine.loop.steps`).

Every step is one ragged batch. Sequences that are nearly done (draft steps, verification rows, a short delta) go
first, whole, least recently served first. Long ones (prefill) get what is left of the token budget, of which a fixed
share is theirs even when the others could fill the step, and within it no more than the prefill budget: the time by
which prefill may lengthen a step that others are in, or that others may have to wait for. Of that, one half goes to
the prompt that came first, so that none starves, and the other to the one with the least left, so that a short prompt
does not wait for all of a long one.

Not here: tensors, KV blocks (reserved before a job gets here), waiting for blocks, a clock. Called by `steps` and by
the simulated device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.engine.schedule.step_times import StepLoad, StepTimes
from specdec.types import BLOCK_TOKENS

DEFAULT_MAX_STEP_TOKENS = 512

#: A verification then takes at most this much longer beside a prompt: a stream of four tokens a round stays below
#: 20 ms a token with a 70B target, whose chunks of this length still run at two thirds of full speed.
DEFAULT_PREFILL_BUDGET_S = 0.05

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

    @property
    def kv_len(self) -> int:
        """Tokens that have run."""
        ...


@dataclass(frozen=True, slots=True)
class StepChunk:
    """The next tokens of one job."""

    job_index: int
    num_tokens: int
    num_logit_rows: int


class Scheduler:
    """Plans step after step; remembers how many there were and what they took."""

    def __init__(
        self,
        max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS,
        prefill_budget_s: float = DEFAULT_PREFILL_BUDGET_S,
    ) -> None:
        self.max_step_tokens = max_step_tokens
        self._prefill_budget_s = prefill_budget_s
        self._prefill_share = max(1, max_step_tokens // _PREFILL_SHARE)
        self._times = StepTimes()
        self._planned = StepLoad()
        self._is_oldest_first = False
        self.num_steps = 0

    def plan_chunks(self, jobs: Iterable[Schedulable], *, num_awaited: int = 0) -> list[StepChunk]:
        """Chooses the chunks of the next step; empty only when there is no job.

        A step exceeds the token budget only when one job's logit-bearing tail alone does. Prefill lengthens it by no
        more than the prefill budget, as predicted from the steps observed, or is one block of tokens, the least there
        is; but while prompts are all there is and `num_awaited` is 0, nobody can be delayed and only the token budget
        counts.

        Args:
            jobs: those that can run, in order of arrival.
            num_awaited: sessions that may call while the step runs.
        """
        indexed = list(enumerate(jobs))
        short = [(index, job) for index, job in indexed if is_short(job)]
        long = [(index, job) for index, job in indexed if not is_short(job)]
        prefill_share = min(self._prefill_share, sum(job.num_pending for _, job in long))
        chunks: list[StepChunk] = []
        budget = self.max_step_tokens - prefill_share
        num_context_tokens = 0
        for index, job in sorted(short, key=lambda entry: entry[1].last_step):
            if job.num_pending > budget and chunks:
                break  # and not a smaller one behind it, which would let it wait for ever
            chunks.append(StepChunk(index, job.num_pending, job.num_logit_rows))
            budget -= job.num_pending
            num_context_tokens += job.kv_len
        self._planned = StepLoad(sum(chunk.num_tokens for chunk in chunks), num_context_tokens)
        if long:
            budget_s = self._prefill_budget_s if chunks or num_awaited else float("inf")
            shares = self._share_prefill([job for _, job in long], budget + prefill_share, budget_s)
            chunks += [_prefill_chunk(*entry, share) for entry, share in zip(long, shares, strict=True) if share]
        self.num_steps += 1
        for chunk in chunks:
            indexed[chunk.job_index][1].last_step = self.num_steps
        return chunks

    def observe_step(self, seconds: float) -> None:
        """The step planned last took this long."""
        self._times.observe(self._planned, seconds)

    def observe_run(self, num_steps: int, num_sequences: int, seconds: float) -> None:
        """The step planned last, and those of one more token a sequence that followed it, took this long together."""
        self._times.observe_run(self._planned, num_steps, num_sequences, seconds)

    def predict_step_s(self, load: StepLoad) -> float:
        """Seconds that a step takes, rather too many than too few; infinite before anything was measured.

        May be asked from another thread while a step runs.
        """
        return self._times.step_s(load)

    def usual_step_s(self, num_context_tokens: int) -> float:
        """Seconds of a step that is one token of one session with so much context; 0 before steps were measured."""
        return self._times.usual_s(StepLoad(1, num_context_tokens))

    def predict_replay_s(self, num_tokens: int, kv_len: int) -> float:
        """Seconds to run the next tokens of a prompt, alone on the device; 0 before that was measured."""
        return self._times.replay_s(num_tokens, kv_len, self.max_step_tokens)

    def _share_prefill(self, jobs: Sequence[Schedulable], max_tokens: int, budget_s: float) -> list[int]:
        """Tokens for each prompt, 0 or more: block by block, in turns of the oldest and the shortest one left."""
        shares = [0] * len(jobs)
        queues = list(range(len(jobs))), sorted(range(len(jobs)), key=lambda index: jobs[index].num_pending)
        # The side that begins has the larger half, and all of a step that takes one block only.
        self._is_oldest_first = not self._is_oldest_first
        side = int(not self._is_oldest_first)
        while max_tokens > 0:
            index = next((index for index in queues[side] if shares[index] < jobs[index].num_pending), None)
            if index is None:
                break
            job, side = jobs[index], 1 - side
            num_tokens = min(BLOCK_TOKENS, job.num_pending - shares[index], max_tokens)
            load = self._planned.with_prefill(num_tokens, job.kv_len + shares[index])
            is_first = not self._planned.num_prefill_tokens
            if not is_first and budget_s < float("inf") and self._times.prefill_s(load) > budget_s:
                break
            self._planned = load
            shares[index] += num_tokens
            max_tokens -= num_tokens
        return shares


def is_short(job: Schedulable) -> bool:
    """Whether a job runs whole in one step, ahead of prefill: at most a block of tokens before its logit rows."""
    return job.num_pending <= BLOCK_TOKENS + job.num_logit_rows


def _prefill_chunk(job_index: int, job: Schedulable, share: int) -> StepChunk:
    """All of the job, or as much of its share as leaves the logit-bearing tail whole."""
    if share == job.num_pending:
        return StepChunk(job_index, share, job.num_logit_rows)
    return StepChunk(job_index, min(share, job.num_pending - job.num_logit_rows), 0)
