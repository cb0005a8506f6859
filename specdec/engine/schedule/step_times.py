"""What the prefill in a step costs, learned from the steps that were run.

Three records, each of one kind of step, so that hours without a prompt do not make any of them forget: steps without
prefill; how much longer a step took for the prefill beside its other tokens; whole steps of nothing but prefill.
Arithmetic on what it is told, no clock: the same steps give the same predictions. Not here: how a line is fitted
(`specdec.core.forward_time`), what is decided by it (`scheduler`, which alone calls this, and the loop's watchdog
through it).
"""

from __future__ import annotations

from typing import NamedTuple

from specdec.core.forward_time import ForwardTime

#: A prediction reaches this many times as far as the most tokens that its record was measured with.
MAX_GROWTH = 2


class StepLoad(NamedTuple):
    """What a step runs, as far as its time depends on it."""

    num_tokens: int = 0
    """Of draft steps, verifications and short deltas."""
    num_context_tokens: int = 0
    """That their sequences hold already."""
    num_prefill_tokens: int = 0
    num_prefill_pairs: float = 0.0
    """Prefill tokens times the tokens that each of them attends to."""

    def with_prefill(self, num_tokens: int, kv_len: int) -> StepLoad:
        """The same with the next `num_tokens` tokens of a prompt whose first `kv_len` have run."""
        return self._replace(
            num_prefill_tokens=self.num_prefill_tokens + num_tokens,
            num_prefill_pairs=self.num_prefill_pairs + num_tokens * (kv_len + 0.5 * num_tokens),
        )


class _Record:
    """A fit without its first observation: whatever is cold is paid for in that one."""

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
        """Seconds; infinite for more than can be told from what was measured."""
        if not self.time.is_measured or num_tokens > MAX_GROWTH * self._most_tokens:
            return float("inf")
        return self.time.predict(num_tokens, context)


class StepTimes:
    """Predicts by how much prefill lengthens a step, and what a whole step takes at most."""

    def __init__(self) -> None:
        self._without = _Record(is_fixed=True)
        # As long as all chunks had one size, all of their time counts as per token: too much rather than too little.
        self._beside = _Record(is_fixed=False)
        self._alone = _Record(is_fixed=False)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step took this long."""
        if not load.num_prefill_tokens:
            self._without.observe(load.num_tokens, load.num_context_tokens, seconds)
            return
        record, longer_s = self._alone, seconds
        if load.num_tokens:
            record = self._beside
            longer_s = max(0.0, seconds - self._without.time.predict(load.num_tokens, load.num_context_tokens))
        record.observe(load.num_prefill_tokens, load.num_prefill_pairs, longer_s)

    def observe_run(self, load: StepLoad, num_steps: int, num_sequences: int, seconds: float) -> None:
        """A step, and those of one more token a sequence that followed it, took this long together.

        Nothing is learned where the first one read a prompt, as how much of the time was that cannot be told.
        """
        if not load.num_prefill_tokens:
            num_tokens = load.num_tokens + (num_steps - 1) * num_sequences
            # On average they took what a step takes that is as long as they were on average.
            self._without.observe(num_tokens / num_steps, load.num_context_tokens, seconds / num_steps)

    def prefill_s(self, load: StepLoad) -> float:
        """Seconds by which the prefill of `load` lengthens the step; all of the step where there is nothing else.

        Infinite for more than can be told from what was measured.
        """
        record = self._beside if load.num_tokens else self._alone
        return record.predict(load.num_prefill_tokens, load.num_prefill_pairs)

    def replay_s(self, num_tokens: int, kv_len: int, step_tokens: int) -> float:
        """Seconds to run the next `num_tokens` tokens of a prompt in steps of `step_tokens` and nothing else.

        0 before such a step was measured.
        """
        time, load = self._alone.time, StepLoad().with_prefill(num_tokens, kv_len)
        num_more_steps = -(-num_tokens // step_tokens) - 1
        return time.predict(load.num_prefill_tokens, load.num_prefill_pairs) + num_more_steps * time.predict(0, 0)

    def usual_s(self, load: StepLoad) -> float:
        """Seconds that a step without prefill takes on average; 0 before such a step was measured."""
        return self._without.time.predict(load.num_tokens, load.num_context_tokens)

    def step_s(self, load: StepLoad) -> float:
        """Seconds that a step takes, rather too many than too few; infinite before anything was measured.

        Scaled up from whole steps of one kind: what prefill adds to others is a difference of predictions.
        """
        num_tokens = load.num_tokens + load.num_prefill_tokens
        context = load.num_context_tokens + load.num_prefill_pairs
        records = (self._alone, self._without) if load.num_prefill_tokens else (self._without, self._alone)
        measured = [record.time for record in records if record.time.is_measured]
        return measured[0].scaled(num_tokens, context) if measured else float("inf")
