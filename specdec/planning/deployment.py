"""Searches for the fewest GPUs that serve a load within its latencies.

A stream alternates between a draft of gamma tokens and a verification, so a round takes both and their messages. While
one stream drafts, the target verifies others: the number of sequences that a target verifies at once follows from the
share of a round that it is busy with a stream, and is found by iteration. Little's law gives the number of streams at
once. Each combination of gamma, streams per target and streams per draft that holds the limits is a candidate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from specdec.errors import InvalidRequest
from specdec.planning.cards import Card
from specdec.planning.step_times import DRAFT_CALL_S, TARGET_CALL_S, PlacedModel

MAX_GAMMA = 8
#: Share of the streams with which a replica holds the limits that is planned for it: the rest is for peaks, until an
#: autoscaler has added a replica.
PLANNED_SHARE = 0.8
#: Largest share of a target's time for prompts.
_MAX_PREFILL_SHARE = 0.8
_MAX_RANKS = 8
_STREAMS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: Processor time of a coordinator for a token, and the share of a core that is planned (docs/performance.md).
_COORDINATOR_S_PER_TOKEN, _CORE_SHARE = 0.0002, 0.6
#: Of a stored session beside its tokens, and of a token (docs/reference/redis.md).
_SESSION_BYTES, _TOKEN_BYTES = 2_500, 4


@dataclass(frozen=True, slots=True)
class Load:
    """The load, and the latencies that it may have."""

    rate_per_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    """Limit of the time to the first token."""
    tpot_s: float
    """Limit of the time per further token."""
    session_ttl_s: float = 3600.0
    """Time that Redis keeps an idle session."""

    @property
    def context_tokens(self) -> float:
        """Mean tokens of a running stream."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Deployment:
    """Numbers of a deployment and what they give."""

    target: PlacedModel
    draft: PlacedModel | None
    gamma: int
    num_targets: int
    num_drafts: int
    num_streams: float
    """Streams at once, by Little's law."""
    ttft_s: float
    tpot_s: float
    target_busy_share: float
    draft_busy_share: float
    tokens_per_round: float
    kv_bytes_per_target: float
    """KV of the streams of one target at their full length."""

    @property
    def num_gpus(self) -> int:
        draft_gpus = 0 if self.draft is None else self.num_drafts * self.draft.num_gpus
        return self.num_targets * self.target.num_gpus + draft_gpus

    def redis_bytes(self, load: Load) -> float:
        """Return the memory of the sessions that Redis keeps."""
        num_sessions = load.rate_per_s * load.session_ttl_s + self.num_streams
        return num_sessions * (_SESSION_BYTES + _TOKEN_BYTES * (load.prompt_tokens + load.output_tokens))

    def redis_writes_per_s(self, load: Load) -> float:
        """Return the number of commits: one a round."""
        return load.rate_per_s * load.output_tokens / self.tokens_per_round

    def num_coordinators(self, load: Load) -> int:
        """Return the number of coordinator processes, each with one core; two at least, so that one may end."""
        cores = load.rate_per_s * load.output_tokens * _COORDINATOR_S_PER_TOKEN / _CORE_SHARE
        return max(2, math.ceil(cores))

    def gpu_hours_per_million_tokens(self, load: Load) -> float:
        return self.num_gpus * 1e6 / (load.rate_per_s * load.output_tokens * 3600)

    def limits(self, load: Load) -> str:
        """Return what keeps a target from more streams."""
        shares = {
            "time per token": self.tpot_s / load.tpot_s,
            "time to the first token": self.ttft_s / load.ttft_s,
            "KV memory of the targets": self.kv_bytes_per_target / self.target.kv_bytes,
        }
        return max(shares, key=lambda name: shares[name])


def tokens_per_round(alpha: float, gamma: int) -> float:
    """Return the mean tokens of a round (Leviathan, Kalman and Matias 2023, equation 1)."""
    return sum(alpha**accepted for accepted in range(gamma + 1))


def formula_speedup(alpha: float, gamma: int, cost: float) -> float:
    """Return tokens per second against the target alone with one stream (the same paper, theorem 3.8).

    Args:
        alpha: acceptance rate.
        gamma: draft tokens of a round.
        cost: time of a draft step over that of a step of the target.
    """
    return tokens_per_round(alpha, gamma) / (gamma * cost + 1.0)


def placed(model: PlacedModel, card: Card, room_tokens: int) -> PlacedModel:
    """Return a model on the fewest cards that hold its weights and the KV of a stream.

    Args:
        model: the model, on any number of cards.
        card: the card.
        room_tokens: tokens of a stream.

    Raises:
        InvalidRequest: eight cards do not hold it.
    """
    num_gpus = 1
    while num_gpus <= _MAX_RANKS:
        one = replace(model, card=card, num_gpus=num_gpus)
        if one.kv_bytes >= room_tokens * model.kv_bytes_per_token:
            return one
        num_gpus *= 2
    raise InvalidRequest(
        f"--gpu: {model.name} needs {model.weight_bytes / 1e9:.0f} GB and {_MAX_RANKS} x {card.name} have "
        f"{_MAX_RANKS * card.memory_gb:.0f} GB",
        field="gpu",
    )


def best_deployment(load: Load, alpha: float, target: PlacedModel, draft: PlacedModel | None) -> Deployment:
    """Return the deployment with the fewest GPUs, and of these the one with the least time per token.

    Args:
        load: the load.
        alpha: acceptance rate of the draft.
        target: the placed target.
        draft: the placed draft; None: without speculation.

    Raises:
        InvalidRequest: no deployment holds the limits; the message names the one that fails and its least value.
    """
    _require_reachable(load, alpha, target, draft)
    found = min(
        _candidates(load, alpha, target, draft),
        key=lambda each: (each.num_gpus, each.num_drafts, each.tpot_s),
        default=None,
    )
    if found is None:
        raise InvalidRequest(
            "--tpot-ms and --ttft-ms leave no room for the load: raise one of them, or name a faster --gpu",
            field="tpot_ms",
        )
    return found


def _require_reachable(load: Load, alpha: float, target: PlacedModel, draft: PlacedModel | None) -> None:
    gammas = range(MAX_GAMMA + 1) if draft else (0,)
    rounds = [
        steady_round(load, target, draft, gamma, 1, 1).round_s / tokens_per_round(alpha, gamma) for gamma in gammas
    ]
    if min(rounds) > load.tpot_s:
        least = f"{min(rounds) * 1e3:.1f}"
        raise InvalidRequest(
            f"--tpot-ms must be at least {least} on {target.num_gpus} x {target.card.name}, the time of one stream, "
            f"got {load.tpot_s * 1e3:g}",
            field="tpot_ms",
        )
    first_s = target.prefill_s(load.prompt_tokens) + TARGET_CALL_S
    if first_s > load.ttft_s:
        raise InvalidRequest(
            f"--ttft-ms must be at least {first_s * 1e3:.1f}, the time of a prompt of {load.prompt_tokens} tokens, "
            f"got {load.ttft_s * 1e3:g}",
            field="ttft_ms",
        )


def _candidates(load: Load, alpha: float, target: PlacedModel, draft: PlacedModel | None) -> Iterator[Deployment]:
    for gamma in range(1, MAX_GAMMA + 1) if draft else (0,):
        for per_target in _STREAMS:
            for per_draft in _STREAMS if draft else (0,):
                candidate = _deployment(load, alpha, target, draft, gamma, per_target, per_draft)
                if candidate is not None:
                    yield candidate


def _deployment(
    load: Load,
    alpha: float,
    target: PlacedModel,
    draft: PlacedModel | None,
    gamma: int,
    per_target: int,
    per_draft: int,
) -> Deployment | None:
    """Return the deployment with these streams for each target and draft; None if it breaks a limit."""
    kv_bytes = per_target * (load.prompt_tokens + load.output_tokens) * target.kv_bytes_per_token
    if kv_bytes > target.kv_bytes:
        return None
    num_tokens = tokens_per_round(alpha, gamma)
    steady = steady_round(load, target, draft, gamma, per_target, per_draft)
    # The prompts of other streams take time of the same target.
    prefill_s = target.prefill_s(load.prompt_tokens)
    # By Little's law: a stream lasts for its decoding and its prompt, both stretched by the prompts of the others.
    asked = per_target * prefill_s / (load.output_tokens * steady.round_s / num_tokens + prefill_s)
    prefill_share = asked / (1.0 + asked)
    if prefill_share >= _MAX_PREFILL_SHARE:
        return None
    tpot_s = steady.round_s / num_tokens / (1.0 - prefill_share)
    ttft_s = prefill_s / (1.0 - prefill_share) + steady.verify_s + TARGET_CALL_S
    target_share = steady.target_busy_share * (1.0 - prefill_share) + prefill_share
    if tpot_s > load.tpot_s or ttft_s > load.ttft_s:
        return None
    num_streams = load.rate_per_s * (ttft_s + load.output_tokens * tpot_s)
    return Deployment(
        target, draft, gamma,
        num_targets=math.ceil(num_streams / (PLANNED_SHARE * per_target)),
        num_drafts=math.ceil(num_streams / (PLANNED_SHARE * per_draft)) if draft else 0,
        num_streams=num_streams, ttft_s=ttft_s, tpot_s=tpot_s,
        target_busy_share=target_share, draft_busy_share=steady.draft_busy_share, tokens_per_round=num_tokens,
        kv_bytes_per_target=kv_bytes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SteadyRound:
    """Means of a round while the number of streams stays the same."""

    round_s: float
    verify_s: float
    """Time of a verification, without messages and waiting."""
    target_busy_share: float
    draft_busy_share: float


def steady_round(
    load: Load, target: PlacedModel, draft: PlacedModel | None, gamma: int, per_target: int, per_draft: int
) -> SteadyRound:
    """Return the round of `per_target` streams for each target and `per_draft` for each draft.

    A call that arrives during a step waits for its end, half a step on average, and the next step takes all that wait.
    So a busy replica takes as many in a step as arrive during one.
    """
    verifying = drafting = 1.0
    target_busy = draft_busy = round_s = verify_s = 0.0
    for _ in range(80):
        verify_s = target.step_s(verifying, gamma + 1, load.context_tokens)
        round_s = verify_s * (1.0 + (target_busy / 2 if per_target > 1 else 0.0)) + TARGET_CALL_S
        if draft is not None and gamma:
            step_s = draft.step_s(drafting, 1, load.context_tokens)
            round_s += step_s * (gamma + (draft_busy / 2 if per_draft > 1 else 0.0)) + DRAFT_CALL_S
            wanted = per_draft * gamma * step_s / round_s
            drafting += 0.5 * (max(1.0, wanted) - drafting)
            draft_busy += 0.5 * (min(1.0, wanted / drafting) - draft_busy)
        wanted = per_target * verify_s / round_s
        verifying += 0.5 * (max(1.0, wanted) - verifying)
        target_busy += 0.5 * (min(1.0, wanted / verifying) - target_busy)
    return SteadyRound(round_s, verify_s, target_busy, draft_busy)
