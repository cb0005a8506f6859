"""Choose the tokens of each session that run in the next step.

The KV blocks of a round are reserved before it is scheduled; the planned chunks go into a step plan for the worker
(`specdec.engine.loop.steps`).

Every step is one ragged batch. Short work (draft steps, verification rows, a short delta) runs first and whole, least
recently served first. Prefill gets the rest of the token budget, with a fixed share that short work cannot take. Within
it, prefill is limited by the prefill budget: the time by which it may lengthen a step that other sessions run in or
wait for. Half of the prefill goes to the oldest prompt, so that none starves, and half to the one with the fewest
tokens left, so that a short prompt does not wait for a long one.

Called by `steps` and by the simulated device; reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.schedule.step_times import StepLoad, StepTimes

DEFAULT_MAX_STEP_TOKENS = 512

#: Longest time that prefill adds to a verification. A stream of four tokens a round then stays below 20 ms a token with
#: a 70B target, whose prefill chunks of this length still run at two thirds of full speed.
DEFAULT_PREFILL_BUDGET_S = 0.05

#: Prefill gets at least 1 / _PREFILL_SHARE of a step's token budget whenever a prompt waits.
_PREFILL_SHARE = 4


class Schedulable(Protocol):
    """The part of a job that the scheduler uses. Jobs are given in order of arrival."""

    num_logit_rows: int
    """Number of last tokens whose logits are needed; they run in one step."""
    last_step: int
    """Step that last served the job; initially `Scheduler.num_steps` at its arrival. Set by `plan_chunks`."""

    @property
    def num_pending(self) -> int:
        """Number of tokens to run; at least `num_logit_rows`."""
        ...

    @property
    def kv_len(self) -> int:
        """Number of tokens that have run."""
        ...


@dataclass(frozen=True, slots=True)
class StepChunk:
    """The next tokens of one job in a step."""

    job_index: int
    num_tokens: int
    num_logit_rows: int


class Scheduler:
    """Planner of steps, which remembers their number and learns their times."""

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
        """Return the chunks of the next step; empty only when there is no job.

        A step exceeds the token budget only if the logit rows of one job alone do. Prefill lengthens the step by at
        most the prefill budget, as predicted from observed steps, or is one block of tokens, the minimum. While only
        prompts are waiting and `num_awaited` is 0, no session can be delayed and only the token budget applies.

        Args:
            jobs: jobs that can run, in order of arrival.
            num_awaited: number of sessions that may call while the step runs.
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
                break  # a smaller job behind it must not overtake it, or it could wait forever
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
        """Record the duration of the step that was planned last."""
        self._times.observe(self._planned, seconds)

    def observe_run(self, num_steps: int, num_sequences: int, seconds: float) -> None:
        """Record the joint duration of the last planned step and the one-token steps that followed it."""
        self._times.observe_run(self._planned, num_steps, num_sequences, seconds)

    def predict_step_s(self, load: StepLoad) -> float:
        """Return a cautious estimate of a step's seconds; infinite before any measurement.

        Another thread may call this while a step runs.
        """
        return self._times.step_s(load)

    def usual_step_s(self, num_context_tokens: int) -> float:
        """Return the mean seconds of a step of one token with this context; 0 before any measurement."""
        return self._times.usual_s(StepLoad(1, num_context_tokens))

    def predict_replay_s(self, num_tokens: int, kv_len: int) -> float:
        """Return the seconds to run the next tokens of a prompt alone on the device; 0 before any measurement."""
        return self._times.replay_s(num_tokens, kv_len, self.max_step_tokens)

    def _share_prefill(self, jobs: Sequence[Schedulable], max_tokens: int, budget_s: float) -> list[int]:
        """Return the tokens for each prompt, given out block by block to the oldest and the shortest in turn."""
        shares = [0] * len(jobs)
        queues = list(range(len(jobs))), sorted(range(len(jobs)), key=lambda index: jobs[index].num_pending)
        # The side that begins gets the larger half, and the whole of a step that takes only one block.
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
    """Return whether a job runs whole in one step: it has at most a block of tokens before its logit rows."""
    return job.num_pending <= BLOCK_TOKENS + job.num_logit_rows


def _prefill_chunk(job_index: int, job: Schedulable, share: int) -> StepChunk:
    """Return all of the job, or the part of its share that keeps the logit rows together."""
    if share == job.num_pending:
        return StepChunk(job_index, share, job.num_logit_rows)
    return StepChunk(job_index, min(share, job.num_pending - job.num_logit_rows), 0)
