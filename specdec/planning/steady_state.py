"""Means of a system under a steady load: times of a round and of the tokens, streams at once, busy shares.

A step of a target takes all calls that wait when it begins. Calls arrive at random, so a step of s seconds at c calls
per second is followed by one of cs calls, and by one of a single call where none has come, which has the probability
exp(-cs): a step has cs + exp(-cs) calls on average. A call waits for the rest of a running step and takes part in the
next one. A stream whose draft is faster than half a step comes back early in the step that followed its own, and waits
for more than the half of it. The streams of one step of a target ask their drafts together. Requests arrive at random,
so a request meets the mean number of others. `bench/planning.py` compares these means with live processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Protocol

#: Largest number of calls in a step of which the mean is sought, and halvings of the interval it lies in.
_MOST_CALLS = 65_536
_NUM_HALVINGS = 40
_NUM_ITERATIONS = 24


class StepModel(Protocol):
    """Times of the steps of one model."""

    def step_s(self, num_sequences: float, num_rows: float, context_tokens: float) -> float:
        """Return the seconds of a step.

        Args:
            num_sequences: sequences in the batch.
            num_rows: mean rows of each.
            context_tokens: mean tokens of KV of each.
        """
        ...


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Times outside the steps of the models."""

    target_s: float
    """Messages, acceptance and commit of a step of the target."""
    draft_s: float
    """Messages of asking a draft replica."""
    opening_s: float
    """Time from a request's arrival until its first call."""


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a system, and their rounds."""

    rate_per_s: float
    prompt_tokens: int
    output_tokens: int
    gamma: int
    """Draft tokens of a round; 0: no draft."""
    tokens_per_round: float

    @property
    def num_rounds(self) -> float:
        return max(1.0, self.output_tokens / self.tokens_per_round)

    @property
    def context_tokens(self) -> float:
        """Mean tokens of a running stream."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Means of a system."""

    round_s: float
    """Time of a round after the first."""
    ttft_s: float
    """Time to the first token, which comes with the others of its round."""
    tpot_s: float
    """Time per further token, as clients measure it: from the first token to the last."""
    num_streams: float
    """Streams at once."""
    target_busy_share: float
    draft_busy_share: float


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of one target."""

    num_calls: float
    """Mean calls of a step."""
    step_s: float
    busy_share: float
    rest_s: float
    """Mean rest of a step that runs when a call arrives."""
    num_others: float
    """Mean number of other calls in the step of a call."""
    num_prompts: float
    """Mean number of prompts of others in it."""


def steady_state(
    requests: Requests,
    calls: CallTimes,
    target: StepModel,
    draft: StepModel | None,
    num_targets: int,
    num_drafts: int,
) -> SteadyState | None:
    """Return the means of a system; None where requests arrive faster than the targets or the drafts can serve them.

    Args:
        requests: what arrives.
        calls: times outside the steps.
        target: the target.
        draft: the draft; None where `requests.gamma` is 0.
        num_targets: target replicas.
        num_drafts: draft replicas; without a draft it does not matter.
    """
    steps = _steps_of(requests, target, requests.rate_per_s / num_targets)
    if steps is None:
        return None
    draft_busy = away_s = first_away_s = 0.0
    if draft is not None and requests.gamma:
        drafting = _drafting(requests, draft, steps, num_targets, num_drafts)
        if drafting is None:
            return None
        draft_busy, wait_s, step_s = drafting
        away_s = wait_s + requests.gamma * step_s + calls.draft_s
        first_away_s = wait_s + _first_draft_s(requests, draft) + calls.draft_s
    step = partial(_step_s, requests, target, 1 + steps.num_others)
    early_s = max(0.0, steps.step_s / 2 - calls.target_s - away_s)
    round_s = away_s + steps.busy_share * (steps.rest_s + early_s) + step(steps.num_prompts) + calls.target_s
    first_s = first_away_s + steps.busy_share * steps.rest_s + step(1 + steps.num_prompts) + calls.target_s
    ttft_s = calls.opening_s + first_s
    further_s = (requests.num_rounds - 1) * round_s
    tpot_s = further_s / (requests.output_tokens - 1) if requests.output_tokens > 1 else 0.0
    num_streams = requests.rate_per_s * (ttft_s + further_s)
    return SteadyState(round_s, ttft_s, tpot_s, num_streams, steps.busy_share, draft_busy)


def _step_s(requests: Requests, target: StepModel, num_calls: float, num_prompts: float) -> float:
    """Return the mean time of a target's step with `num_prompts` prompts on average.

    A prompt is in few steps and long, so its time is that which it adds to such a step.
    """
    context, rows = requests.context_tokens, requests.gamma + 1
    rows_s = target.step_s(num_calls, rows, context)
    prompt_s = target.step_s(num_calls, rows + requests.prompt_tokens / num_calls, context) - rows_s
    return rows_s + num_prompts * prompt_s


def _steps_of(requests: Requests, target: StepModel, rate_per_s: float) -> _Steps | None:
    """Return the steps of a target to which `rate_per_s` requests come; None where its queue grows without end."""
    calls_per_s = rate_per_s * requests.num_rounds
    step = partial(_step_s, requests, target)

    def calls_after(step_s: float) -> float:
        return calls_per_s * step_s + math.exp(-calls_per_s * step_s)

    def step_after(step_s: float) -> float:
        return step(calls_after(step_s), rate_per_s * step_s)

    shortest_s = longest_s = step(1, 0)
    while step_after(longest_s) > longest_s:
        if calls_per_s * longest_s > _MOST_CALLS:
            return None
        longest_s *= 2.0
    for _ in range(_NUM_HALVINGS):
        middle_s = (shortest_s + longest_s) / 2
        if step_after(middle_s) > middle_s:
            shortest_s = middle_s
        else:
            longest_s = middle_s
    step_s = longest_s
    num_calls = calls_after(step_s)
    busy_share = calls_per_s * step_s / num_calls
    # The rest of a running step is half its mean square over its mean. Steps vary by what came, which is random.
    prompt_s, call_s = step(num_calls, 1) - step(num_calls, 0), step(num_calls + 1, 0) - step(num_calls, 0)
    variance = rate_per_s * step_s * prompt_s**2 + calls_per_s * step_s * call_s**2
    rest_s = (step_s + variance / step_s) / 2
    others = busy_share * step_s
    return _Steps(num_calls, step_s, busy_share, rest_s, others * calls_per_s, others * rate_per_s)


def _first_draft_s(requests: Requests, draft: StepModel) -> float:
    """Return the time of a request's first draft tokens: the prompt runs in the first step."""
    context = requests.context_tokens
    return draft.step_s(1, requests.prompt_tokens, 0) + (requests.gamma - 1) * draft.step_s(1, 1, context)


def _drafting(
    requests: Requests, draft: StepModel, steps: _Steps, num_targets: int, num_drafts: int
) -> tuple[float, float, float] | None:
    """Return a draft's busy share, the wait for a running step, and the time of a step; None if it cannot keep up.

    The groups of one target follow each other; those of several targets overlap at random.
    """
    rate_per_s, context = requests.rate_per_s / num_drafts, requests.context_tokens
    group, own_group = max(1.0, steps.num_calls / num_drafts), 1.0 + steps.num_others / num_drafts
    step_s = draft.step_s(group, 1, context)
    busy_share = 0.0
    for _ in range(_NUM_ITERATIONS):
        drafted = rate_per_s * (requests.num_rounds - 1) * requests.gamma * step_s  # streams that draft, on average
        groups = drafted / group + rate_per_s * _first_draft_s(requests, draft)
        if drafted > _MOST_CALLS:
            return None
        busy_share = min(1.0, groups) if num_targets == 1 else -math.expm1(-groups)
        together = max(own_group, drafted) if num_targets == 1 else own_group + drafted
        step_s += 0.5 * (draft.step_s(together, 1, context) - step_s)
    return busy_share, busy_share * step_s / 2, step_s
