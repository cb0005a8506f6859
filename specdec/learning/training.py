"""Trains one draft on one tenant's learning log, for a time that was given.

It begins as it is served. What is logged meanwhile is taken in at the next pass. Not here: the loss
(`distillation`), the file that becomes of it (`version`). Called by `specdec distill`, in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.learning.distillation import acceptance, divergence
from specdec.learning.learner import Learner
from specdec.learning.samples import Batch, Row, Samples, batches_of

#: Rates are for matrices of this width in all; wider drafts learn in smaller steps.
_RATE_TIMES_WIDTH = 0.2

_WARMUP_SHARE = 0.05
_LAST_RATE_SHARE = 0.02
_LARGEST_GRADIENT = 1.0

#: Of a depth's loss, beside the one before: a token is tested only where all before it were accepted.
_DEPTH_WEIGHT = 0.8

#: Held-out tokens that are looked at before and after: at most so many, and of what was trained on this share.
_MAX_HELD_OUT_TOKENS = 20_000
_MIN_HELD_OUT_TOKENS = 2048
_HELD_OUT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How a draft is trained."""

    seconds: float
    """After which no step begins."""
    max_steps: int | None = None
    """After which none follows, either."""
    share: float = 1.0
    """Of the time that it computes; the rest is left to others, a step at a time. Above 0."""
    batch_tokens: int = 2048
    learning_rate: float | None = None
    """Of AdamW at its highest; None: by the model's width."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """What a draft makes of held-out tokens."""

    kl_nats: float
    """Mean KL(target || draft) a token; of what drafts several in a row by itself, over all of these."""
    acceptance: float
    """Expected share of its tokens that are accepted, at least; likewise."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a training came to."""

    before: Figures
    after: Figures
    num_steps: int
    num_learned_tokens: int
    """Different ones."""
    num_held_out_tokens: int
    seconds: float

    @property
    def is_better(self) -> bool:
        """Whether the draft agrees with the target more than before."""
        return self.after.kl_nats < self.before.kl_nats


def train(
    learner: Learner,
    samples: Samples,
    plan: TrainingPlan,
    on_step: Callable[[int, float, float], None] = lambda num_steps, kl_nats, done: None,
) -> Learned:
    """Trains in place.

    Args:
        learner: what is trained.
        samples: read on while it goes.
        plan: of it.
        on_step: told after each step how many there were, its KL, and how much is done, 0..1.
    """
    began, num_steps, num_seen_tokens, done = time.monotonic(), 0, 0, 0.0
    as_they_were = [parameter.detach().clone() for parameter in learner.parameters]
    dice = np.random.default_rng(plan.seed)
    optimizer = torch.optim.AdamW(learner.parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    highest = plan.learning_rate or _RATE_TIMES_WIDTH / learner.width
    while done < 1.0:
        for batch in samples.batches(plan.batch_tokens, dice):
            rate = highest * min(1.0, done / _WARMUP_SHARE + 0.01) * max(_LAST_RATE_SHARE, 1.0 - done)
            with _resting(plan.share):
                kl_nats = _step(learner, optimizer, batch, rate)
            num_steps, num_seen_tokens = num_steps + 1, num_seen_tokens + len(batch.places)
            done = (time.monotonic() - began) / plan.seconds
            done = min(1.0, max(done, num_steps / plan.max_steps) if plan.max_steps else done)
            on_step(num_steps, kl_nats, done)
            if done >= 1.0:
                break
        else:
            samples.read_on()
    _round(learner)  # what is judged is what will be stored
    # What was logged meanwhile included: the more, the surer.
    most_tokens = max(_MIN_HELD_OUT_TOKENS, min(_MAX_HELD_OUT_TOKENS, int(_HELD_OUT_SHARE * num_seen_tokens)))
    held_out = _some(samples.held_out, most_tokens)
    before, after = compare(learner, as_they_were, held_out, plan)
    return Learned(
        before,
        after,
        num_steps,
        sum(row.num_learned for row in samples.learned),
        sum(row.num_learned for row in held_out),
        time.monotonic() - began,
    )


def _step(learner: Learner, optimizer: torch.optim.Optimizer, batch: Batch, rate: float) -> float:
    """One step at a learning rate; the KL before it, in nats a token."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    losses, weights = [], []
    for depth, (logits, drafted) in enumerate(learner.depths(batch)):
        if len(drafted.places):
            losses.append(_DEPTH_WEIGHT**depth * divergence(logits, drafted).mean())
            weights.append(_DEPTH_WEIGHT**depth)
    if not losses:  # every row is a token or two
        return 0.0
    loss = torch.stack(losses).sum() / sum(weights)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(learner.parameters, _LARGEST_GRADIENT)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


@torch.no_grad()
def compare(
    learner: Learner, numbers: Sequence[torch.Tensor], rows: Sequence[Row], plan: TrainingPlan
) -> tuple[Figures, Figures]:
    """What a draft makes of `rows` with `numbers` in place of its parameters, and with its own."""
    before, after, count = np.zeros(2), np.zeros(2), 0
    for batch in batches_of(rows, plan.batch_tokens):
        with _resting(plan.share):
            own, num_places = _sums(learner, batch)
            _exchange(learner, numbers)
            theirs, _ = _sums(learner, batch)
            _exchange(learner, numbers)
        before, after, count = before + theirs, after + own, count + num_places
    return Figures(*(before / max(count, 1)).tolist()), Figures(*(after / max(count, 1)).tolist())


def _sums(learner: Learner, batch: Batch) -> tuple[NDArray[np.float64], int]:
    """KL and expected acceptance over the tokens of a batch at all depths, and how many those are."""
    totals, count = np.zeros(2), 0
    for logits, drafted in learner.depths(batch):
        totals += [divergence(logits, drafted).sum().item(), acceptance(logits, drafted).sum().item()]
        count += len(drafted.places)
    return totals, count


@contextmanager
def _resting(share: float) -> Iterator[None]:
    """Afterwards the rest of the time is left to others."""
    computed_s = time.process_time()
    yield
    # Not by the clock: while others have the machine, or it is stopped, it takes nothing from anybody.
    computed_s = (time.process_time() - computed_s) / torch.get_num_threads()
    time.sleep(computed_s * (1.0 / share - 1.0))


@torch.no_grad()
def _round(learner: Learner) -> None:
    """Makes of the parameters what is left of them once they are stored."""
    for parameter, dtype in zip(learner.parameters, learner.dtypes, strict=True):
        parameter.copy_(parameter.to(dtype))


@torch.no_grad()
def _exchange(learner: Learner, numbers: Sequence[torch.Tensor]) -> None:
    """Puts `numbers` in place of the parameters, and those in place of `numbers`."""
    for parameter, other in zip(learner.parameters, numbers, strict=True):
        mine = parameter.clone()
        parameter.copy_(other)
        other.copy_(mine)


def _some(rows: Sequence[Row], most_tokens: int) -> list[Row]:
    """Rows up to a number of tokens, one at least."""
    ends = np.cumsum([row.num_learned for row in rows])
    return list(rows[: max(1, int(np.searchsorted(ends, most_tokens)))])
