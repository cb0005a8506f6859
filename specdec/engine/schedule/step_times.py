"""Predict the time of steps, learned from the steps that were run.

Three records keep the kinds of steps apart, so that hours without a prompt do not age the others: steps without
prefill, the additional time of prefill beside other tokens, and steps of prefill alone. The same steps give the same
predictions, because no clock is read. `specdec.core.forward_time` fits the lines. Called by `scheduler` alone.
"""

from __future__ import annotations

from typing import NamedTuple

from specdec.core.forward_time import ForwardTime

#: Predictions are given for up to this many times the largest measured number of tokens.
MAX_GROWTH = 2


class StepLoad(NamedTuple):
    """Amount of work in a step, as far as its time depends on it."""

    num_tokens: int = 0
    """Number of tokens of draft steps, verifications and short deltas."""
    num_context_tokens: int = 0
    """Number of tokens that their sequences hold already."""
    num_prefill_tokens: int = 0
    num_prefill_pairs: float = 0.0
    """Prefill tokens times the tokens that each of them attends to."""

    def with_prefill(self, num_tokens: int, kv_len: int) -> StepLoad:
        """Return the load with the next `num_tokens` tokens of a prompt whose first `kv_len` have run."""
        return self._replace(
            num_prefill_tokens=self.num_prefill_tokens + num_tokens,
            num_prefill_pairs=self.num_prefill_pairs + num_tokens * (kv_len + 0.5 * num_tokens),
        )


class _Record:
    """A fit that ignores its first observation, which pays for cold caches."""

    def __init__(self, *, is_fixed: bool) -> None:
        self.time = ForwardTime(is_fixed=is_fixed)
        self._is_cold = True
        self._most_tokens = 0.0

    def observe(self, num_tokens: float, context: float, seconds: float) -> None:
        if self._is_cold:
            self._is_cold = False
            return
        self.time.observe(num_tokens, context, seconds)
        self._most_tokens = max(self._most_tokens, num_tokens)

    def predict(self, num_tokens: int, context: float) -> float:
        """Return seconds; infinite for more tokens than the measurements cover."""
        if not self.time.is_measured or num_tokens > MAX_GROWTH * self._most_tokens:
            return float("inf")
        return self.time.predict(num_tokens, context)


class StepTimes:
    """Predictor of the time that prefill adds to a step, and of whole steps."""

    def __init__(self) -> None:
        self._without = _Record(is_fixed=True)
        # While all chunks have one size, all of their time counts as per token, which overestimates.
        self._beside = _Record(is_fixed=False)
        self._alone = _Record(is_fixed=False)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Record the duration of a step."""
        if not load.num_prefill_tokens:
            self._without.observe(load.num_tokens, load.num_context_tokens, seconds)
            return
        record, longer_s = self._alone, seconds
        if load.num_tokens:
            record = self._beside
            longer_s = max(0.0, seconds - self._without.time.predict(load.num_tokens, load.num_context_tokens))
        record.observe(load.num_prefill_tokens, load.num_prefill_pairs, longer_s)

    def observe_run(self, load: StepLoad, num_steps: int, num_sequences: int, seconds: float) -> None:
        """Record the joint duration of a step and the one-token steps that followed it.

        Nothing is learned if the first step had prefill, because its share of the time is unknown.
        """
        if not load.num_prefill_tokens:
            num_tokens = load.num_tokens + (num_steps - 1) * num_sequences
            # The mean time of the steps is the time of a step of mean length.
            self._without.observe(num_tokens / num_steps, load.num_context_tokens, seconds / num_steps)

    def prefill_s(self, load: StepLoad) -> float:
        """Return the seconds that the prefill of `load` adds to the step, or the whole step if it is prefill alone.

        Infinite for more tokens than the measurements cover.
        """
        record = self._beside if load.num_tokens else self._alone
        return record.predict(load.num_prefill_tokens, load.num_prefill_pairs)

    def replay_s(self, num_tokens: int, kv_len: int, step_tokens: int) -> float:
        """Return the seconds to run the next `num_tokens` tokens of a prompt in steps of `step_tokens` tokens.

        0 before such a step was measured.
        """
        time, load = self._alone.time, StepLoad().with_prefill(num_tokens, kv_len)
        num_more_steps = -(-num_tokens // step_tokens) - 1
        return time.predict(load.num_prefill_tokens, load.num_prefill_pairs) + num_more_steps * time.predict(0, 0)

    def usual_s(self, load: StepLoad) -> float:
        """Return the mean seconds of a step without prefill; 0 before such a step was measured."""
        return self._without.time.predict(load.num_tokens, load.num_context_tokens)

    def step_s(self, load: StepLoad) -> float:
        """Return a cautious estimate of a step's seconds; infinite before any measurement.

        It is scaled up from whole steps of one kind, because the time that prefill adds is a difference of predictions.
        """
        num_tokens = load.num_tokens + load.num_prefill_tokens
        context = load.num_context_tokens + load.num_prefill_pairs
        records = (self._alone, self._without) if load.num_prefill_tokens else (self._without, self._alone)
        measured = [record.time for record in records if record.time.is_measured]
        return measured[0].scaled(num_tokens, context) if measured else float("inf")
