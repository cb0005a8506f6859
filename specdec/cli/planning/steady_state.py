"""Means of a system under a steady load: times of a round and of the tokens, streams at once, busy shares.

A step of a target takes all calls that wait when it begins. Calls arrive at random, so a step of s seconds at c calls
per second is followed by one of cs calls, and by one of a single call if none has come, which has the probability
exp(-cs): a step has cs + exp(-cs) calls on average. A call waits for the rest of a running step and takes part in the
next one. A stream whose draft is faster than half a step comes back early in the step that followed its own, and waits
for more than the half of it. A stream without a draft is in every step, because its target goes on by itself. The
streams of one step of a target come back to the coordinators together, and each of these serves its share of them one
by one; then they ask their drafts. Requests arrive at random, so a request meets the mean number of others.
`bench/suites/planning.py` compares these means with live processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

#: Longest step that is sought. A longer one means that a queue grows without end.
_LONGEST_STEP_S = 1e4
#: The interval in which the time of a step is sought is halved this many times.
_NUM_HALVINGS = 40


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
    coordinator_s: float = 0.0
    """Processor time of a coordinator for a token, in which its other streams wait."""


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
    target_calls: float = 0.0
    """Calls in all targets at once; a stream without a draft is one call."""
    draft_calls: float = 0.0
    """Calls in all drafts at once."""


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


@dataclass(frozen=True, slots=True)
class _Drafting:
    """Steps of one draft."""

    busy_share: float
    wait_s: float
    """Mean rest of a running step, for which a call waits."""
    step_s: float
    first_s: float
    """Time of a request's first draft tokens: the prompt runs in the first step."""


def steady_state(
    requests: Requests,
    calls: CallTimes,
    target: StepModel,
    draft: StepModel | None,
    num_targets: int,
    num_drafts: int,
    num_coordinators: float = 1.0,
) -> SteadyState | None:
    """Return the means of a system; None if requests arrive faster than the replicas of a pool can serve them.

    Args:
        requests: what arrives.
        calls: times outside the steps.
        target: the target.
        draft: the draft; None if `requests.gamma` is 0.
        num_targets: target replicas.
        num_drafts: draft replicas; without a draft it does not matter.
        num_coordinators: coordinators, each with one core. They delay the tokens of a stream without a draft, and not
            its steps.
    """
    steps = _steps_of(requests, target, requests.rate_per_s / num_targets)
    if steps is None:
        return None
    draft_busy = away_s = first_away_s = turn_s = 0.0
    if draft is not None and requests.gamma:
        drafting = _drafting(requests, draft, steps, num_targets, num_drafts)
        waited_s = _coordinator_wait_s(requests, calls, steps, num_coordinators)
        if drafting is None or waited_s is None:
            return None
        turn_s = waited_s
        draft_busy = drafting.busy_share
        away_s = turn_s + drafting.wait_s + requests.gamma * drafting.step_s + calls.draft_s
        first_away_s = drafting.wait_s + drafting.first_s + calls.draft_s
    step = partial(_target_step_s, requests, target, 1 + steps.num_others)
    round_s = step(steps.num_prompts)
    if requests.gamma:  # without a draft a run is in every step
        early_s = max(0.0, steps.step_s / 2 - calls.target_s - away_s)
        round_s += away_s + steps.busy_share * (steps.rest_s + early_s) + calls.target_s
    first_s = first_away_s + steps.busy_share * steps.rest_s + step(1 + steps.num_prompts) + calls.target_s
    ttft_s = calls.opening_s + first_s
    further_s = (requests.num_rounds - 1) * round_s
    tpot_s = further_s / (requests.output_tokens - 1) if requests.output_tokens > 1 else 0.0
    num_streams = requests.rate_per_s * (ttft_s + further_s)
    in_draft = max(0.0, away_s - turn_s - calls.draft_s) / round_s if requests.gamma else 0.0
    in_target = 1.0 - (away_s + calls.target_s) / round_s if requests.gamma else 1.0
    return SteadyState(
        round_s, ttft_s, tpot_s, num_streams, steps.busy_share, draft_busy, in_target * num_streams,
        in_draft * num_streams,
    )  # fmt: skip


def _step_s(
    model: StepModel, num_calls: float, rows: float, num_prompts: float, prompt_tokens: int, context_tokens: float
) -> float:
    """Return the mean time of a step of calls with `rows` each and of `num_prompts` prompts on average.

    A prompt is in few steps and long, so its time is at least that which it adds to such a step; and the mean is at
    least the time of the mean step, because the time grows faster and faster with the rows.
    """
    rows_s = model.step_s(num_calls, rows, context_tokens)
    prompt_s = model.step_s(num_calls, rows + prompt_tokens / num_calls, context_tokens) - rows_s
    mean_s = model.step_s(num_calls, rows + num_prompts * prompt_tokens / num_calls, context_tokens)
    return max(rows_s + num_prompts * prompt_s, mean_s)


def _steady_step_s(step_after: Callable[[float], float], shortest_s: float) -> float | None:
    """Return the step time that is followed by an equal one; None if each is followed by a longer one.

    Args:
        step_after: time of the step that follows one of a given time; it grows with it.
        shortest_s: time that the result is not below.
    """
    longest_s = shortest_s
    while step_after(longest_s) > longest_s:
        longest_s *= 2.0
        if longest_s > _LONGEST_STEP_S:
            return None
    for _ in range(_NUM_HALVINGS):
        middle_s = (shortest_s + longest_s) / 2
        if step_after(middle_s) > middle_s:
            shortest_s = middle_s
        else:
            longest_s = middle_s
    return longest_s


def _target_step_s(requests: Requests, target: StepModel, num_calls: float, num_prompts: float) -> float:
    rows, context = requests.gamma + 1, requests.context_tokens
    return _step_s(target, num_calls, rows, num_prompts, requests.prompt_tokens, context)


def _steps_of(requests: Requests, target: StepModel, rate_per_s: float) -> _Steps | None:
    """Return the steps of a target to which `rate_per_s` requests come; None if its queue grows without end."""
    calls_per_s = rate_per_s * requests.num_rounds
    step = partial(_target_step_s, requests, target)

    def calls_after(step_s: float) -> float:
        return calls_per_s * step_s + math.exp(-calls_per_s * step_s)

    step_s = _steady_step_s(lambda last_s: step(calls_after(last_s), rate_per_s * last_s), step(1, 0))
    if step_s is None:
        return None
    num_calls = calls_after(step_s)
    busy_share = calls_per_s * step_s / num_calls
    # The rest of a running step is half its mean square over its mean. Steps vary by what came, which is random.
    prompt_s, call_s = step(num_calls, 1) - step(num_calls, 0), step(num_calls + 1, 0) - step(num_calls, 0)
    variance = rate_per_s * step_s * prompt_s**2 + calls_per_s * step_s * call_s**2
    rest_s = (step_s + variance / step_s) / 2
    others = busy_share * step_s
    return _Steps(num_calls, step_s, busy_share, rest_s, others * calls_per_s, others * rate_per_s)


def _coordinator_wait_s(requests: Requests, calls: CallTimes, steps: _Steps, num_coordinators: float) -> float | None:
    """Return the mean time for which a stream waits for its coordinator; None if the coordinators cannot keep up.

    The streams of a step arrive together, and each takes a fixed time: the wait is that of the queue M[X]/D/1.
    """
    round_s = calls.coordinator_s * requests.tokens_per_round
    busy_share = requests.rate_per_s * requests.num_rounds * round_s / num_coordinators
    if busy_share >= 1.0:
        return None
    others_s = steps.num_others / num_coordinators * round_s
    return (others_s + busy_share * round_s) / 2 / (1.0 - busy_share)


def _drafting(
    requests: Requests, draft: StepModel, steps: _Steps, num_targets: int, num_drafts: int
) -> _Drafting | None:
    """Return the means of a draft; None if it cannot keep up.

    The groups of one target follow each other; those of several targets overlap at random.
    """
    rate_per_s, gamma, context = requests.rate_per_s / num_drafts, requests.gamma, requests.context_tokens
    group, own_group = max(1.0, steps.num_calls / num_drafts), 1.0 + steps.num_others / num_drafts
    step = partial(_step_s, draft, rows=1, prompt_tokens=requests.prompt_tokens, context_tokens=context)

    def num_drafting(step_s: float) -> float:
        return rate_per_s * requests.num_rounds * gamma * step_s

    def step_after(step_s: float) -> float:
        drafting = num_drafting(step_s)
        together = max(own_group, drafting) if num_targets == 1 else own_group + drafting
        return step(together, num_prompts=rate_per_s * step_s)

    step_s = _steady_step_s(step_after, step(own_group, num_prompts=0.0))
    if step_s is None:
        return None
    first_s = step(1.0, num_prompts=1.0) + (gamma - 1) * step_s
    later = (requests.num_rounds - 1) / requests.num_rounds * num_drafting(step_s)
    groups = later / group + rate_per_s * first_s
    busy_share = min(1.0, groups) if num_targets == 1 else -math.expm1(-groups)
    return _Drafting(busy_share, busy_share * step_s / 2, step_s, first_s)
