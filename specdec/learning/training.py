"""Trains one draft on the learning log of one tenant, for a given time or until held-out text stops improving.

Training starts from the draft as it is served, and each pass includes what was logged meanwhile. `early_stopping`
has the end, `trained_model` the files. `specdec distill` calls this in a child process.

A logged distribution has entries for the target's top tokens and one tail mass for all others. The divergence compares
the entries and the tail masses; it is smallest when the draft matches all of them. A token outside the draft's
vocabulary counts towards the tail mass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.learning.early_stopping import EarlyStopping, first_rows, split_held_out
from specdec.learning.learner import Learner
from specdec.learning.samples import Row, Samples, TrainingBatch, batches_of

#: Lower bound of the draft's tail mass: a smaller one would make the draft learn rounding errors.
_LEAST_REST = 1e-6


#: Lower bound of the temperature that logits are divided by. Below it a distribution is almost a greedy choice, and the
#: scaled logits of one request would outweigh those of all others.
_LEAST_TEMPERATURE = 0.1


def divergence(logits: torch.Tensor, batch: TrainingBatch) -> torch.Tensor:
    """Return KL(target || draft) in nats per token, over the entries and the tail mass.  [M, V] -> [M]

    At temperature 0 this is the draft's negative log-probability of the target's choice.
    """
    log_q = _entry_log_q(logits, batch)
    has_no_word = log_q == -torch.inf
    p = torch.from_numpy(batch.shares).masked_fill(has_no_word, 0.0)
    log_q = log_q.masked_fill(has_no_word, 0.0)  # inf * 0 would be NaN
    rest_p = (1.0 - p.sum(-1)).clamp_min(0.0)
    rest_q = (1.0 - (log_q.exp() * (p > 0)).sum(-1)).clamp_min(_LEAST_REST)
    of_entries = (torch.xlogy(p, p) - p * log_q).sum(-1)
    return of_entries + torch.xlogy(rest_p, rest_p) - rest_p * rest_q.log()


def acceptance(logits: torch.Tensor, batch: TrainingBatch) -> torch.Tensor:
    """Return the probability that a token drawn from the draft is accepted, over the entries.  [M, V] -> [M]

    This is the sum of min(p, q) without the tail mass, hence a lower bound. At temperature 0 it is 1 if both models
    choose the same token, else 0.
    """
    is_greedy = torch.from_numpy(batch.temperatures == 0.0)
    agrees = logits.argmax(-1) == torch.from_numpy(batch.entry_ids[:, 0])
    overlap = torch.minimum(_entry_log_q(logits, batch).exp(), torch.from_numpy(batch.shares)).sum(-1)
    return torch.where(is_greedy, agrees.float(), overlap)


def _entry_log_q(logits: torch.Tensor, batch: TrainingBatch) -> torch.Tensor:
    """Return the draft's log-probabilities of the logged entries.  [M, V] -> [M, K]"""
    temperatures = np.where(batch.temperatures > 0.0, np.maximum(batch.temperatures, _LEAST_TEMPERATURE), 1.0)
    scaled = logits / torch.from_numpy(temperatures.astype(np.float32))[:, None]
    return scaled.gather(-1, torch.from_numpy(batch.entry_ids)) - scaled.logsumexp(-1, keepdim=True)


#: Product of the highest learning rate and the model's width: wider drafts learn in smaller steps.
_RATE_TIMES_WIDTH = 0.2

_WARMUP_SHARE = 0.05
_LAST_RATE_SHARE = 0.02
_LARGEST_GRADIENT = 1.0

#: Weight of a depth's loss relative to the depth before: a token is tested only if all before it were accepted.
_DEPTH_WEIGHT = 0.8

#: Held-out tokens in the verdict: this share of the tokens trained on, within the limits.
_MAX_HELD_OUT_TOKENS = 20_000
_MIN_HELD_OUT_TOKENS = 2048
_HELD_OUT_SHARE = 0.25

#: Least relative decrease of the KL that counts as better. A smaller one is not worth a new version; the first steps
#: reach it by learning how frequent each token is.
_MIN_GAIN = 0.01

#: Size of a log that is likely to be enough: the demo's draft was measured to improve on a log of 47,232 tokens.
_ENOUGH_TOKENS = 50_000
#: Otherwise a log that did not help should grow to this multiple of its size.
_GROWTH = 4


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Limits and settings of a training."""

    seconds: float
    """Time after which no further step begins."""
    max_steps: int | None = None
    """Number of steps after which no further step begins; None: no limit."""
    share: float = 1.0
    """Share of the time in which to compute, above 0. After each step the training sleeps for the remaining time."""
    batch_tokens: int = 2048
    learning_rate: float | None = None
    """Highest learning rate of AdamW; None: a rate that follows from the model's width."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """Quality of a draft on held-out tokens."""

    kl_nats: float
    """Mean KL(target || draft) per token. A draft with several depths is averaged over all of them."""
    acceptance: float
    """Lower bound of the expected share of accepted draft tokens, averaged in the same way."""


@dataclass(frozen=True, slots=True)
class Learned:
    """Result of a training."""

    before: DraftQuality
    after: DraftQuality
    num_steps: int
    num_learned_tokens: int
    """Number of distinct tokens trained on."""
    num_held_out_tokens: int
    seconds: float
    stopped_early: bool = False
    """True if training ended because held-out text no longer improved, and not by its limits."""

    @property
    def is_better(self) -> bool:
        """True if the draft is noticeably closer to the target than before."""
        return self.after.kl_nats < (1.0 - _MIN_GAIN) * self.before.kl_nats

    @property
    def num_missing_tokens(self) -> int:
        """Number of further tokens to log before the next try, by a rule of thumb, if the draft did not improve."""
        return max(_ENOUGH_TOKENS, _GROWTH * self.num_learned_tokens) - self.num_learned_tokens


def train(
    learner: Learner,
    samples: Samples,
    plan: TrainingPlan,
    on_step: Callable[[int, float, float], None] = lambda num_steps, kl_nats, done: None,
) -> Learned:
    """Train a draft in place and leave it with the parameters that were best on held-out text.

    Args:
        learner: draft to train.
        samples: log to train on; new segments are read after each pass.
        plan: limits and settings.
        on_step: called after each step with the number of steps, the step's KL, and the share done, 0 to 1.
    """
    began, num_steps, num_seen_tokens, done = time.monotonic(), 0, 0, 0.0
    initial = [parameter.detach().clone() for parameter in learner.parameters]
    dice = np.random.default_rng(plan.seed)
    optimizer = torch.optim.AdamW(learner.parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    highest = plan.learning_rate or _RATE_TIMES_WIDTH / learner.width
    checked, _ = split_held_out(samples.held_out)
    num_checked_tokens = sum(row.num_learned for row in checked)
    stopping = EarlyStopping(learner.parameters, _kl_nats(learner, checked, plan), num_checked_tokens)
    while done < 1.0 and not stopping.is_over:
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
            if stopping.is_due(num_seen_tokens):
                stopping.add(_kl_nats(learner, checked, plan), num_seen_tokens)
    stopped_early = done < 1.0
    if not stopped_early:
        stopping.add(_kl_nats(learner, checked, plan), num_seen_tokens)
    stopping.restore_best()
    _round(learner)  # the verdict is on the values that will be stored
    max_tokens = max(_MIN_HELD_OUT_TOKENS, min(_MAX_HELD_OUT_TOKENS, int(_HELD_OUT_SHARE * num_seen_tokens)))
    _, judged = split_held_out(samples.held_out)  # sessions logged meanwhile included
    held_out = first_rows(judged, max_tokens)
    before, after = compare(learner, initial, held_out, plan)
    return Learned(
        before,
        after,
        num_steps,
        sum(row.num_learned for row in samples.learned),
        sum(row.num_learned for row in held_out),
        time.monotonic() - began,
        stopped_early,
    )


def _step(learner: Learner, optimizer: torch.optim.Optimizer, batch: TrainingBatch, rate: float) -> float:
    """Take one step with a learning rate, and return the KL before it in nats per token."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    losses, weights = [], []
    for depth, (logits, drafted) in enumerate(learner.depths(batch)):
        if len(drafted.places):
            losses.append(_DEPTH_WEIGHT**depth * divergence(logits, drafted).mean())
            weights.append(_DEPTH_WEIGHT**depth)
    if not losses:  # every row has only one or two tokens
        return 0.0
    loss = torch.stack(losses).sum() / sum(weights)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(learner.parameters, _LARGEST_GRADIENT)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


@torch.no_grad()
def _kl_nats(learner: Learner, rows: Sequence[Row], plan: TrainingPlan) -> float:
    """Return the mean KL of a draft on rows, in nats per token."""
    total, count = 0.0, 0
    for batch in batches_of(rows, plan.batch_tokens):
        with _resting(plan.share):
            sums, num_places = _sums(learner, batch)
        total, count = total + float(sums[0]), count + num_places
    return total / max(count, 1)


@torch.no_grad()
def compare(
    learner: Learner, initial: Sequence[torch.Tensor], rows: Sequence[Row], plan: TrainingPlan
) -> tuple[DraftQuality, DraftQuality]:
    """Return the quality of a draft on `rows` with its initial parameters and with its current ones."""
    before, after, count = np.zeros(2), np.zeros(2), 0
    for batch in batches_of(rows, plan.batch_tokens):
        with _resting(plan.share):
            current_sums, num_places = _sums(learner, batch)
            _exchange(learner, initial)
            initial_sums, _ = _sums(learner, batch)
            _exchange(learner, initial)
        before, after, count = before + initial_sums, after + current_sums, count + num_places
    return DraftQuality(*(before / max(count, 1)).tolist()), DraftQuality(*(after / max(count, 1)).tolist())


def _sums(learner: Learner, batch: TrainingBatch) -> tuple[NDArray[np.float64], int]:
    """Return the sums of KL and expected acceptance over the tokens of a batch at all depths, and their number."""
    totals, count = np.zeros(2), 0
    for logits, drafted in learner.depths(batch):
        totals += [divergence(logits, drafted).sum().item(), acceptance(logits, drafted).sum().item()]
        count += len(drafted.places)
    return totals, count


@contextmanager
def _resting(share: float) -> Iterator[None]:
    """Sleep after the block, so that it computes for `share` of the time."""
    computed_s = time.process_time()
    yield
    # Not wall time: while the process waits for a core, it takes no time from others.
    computed_s = (time.process_time() - computed_s) / torch.get_num_threads()
    time.sleep(computed_s * (1.0 / share - 1.0))


@torch.no_grad()
def _round(learner: Learner) -> None:
    """Round the parameters to the types that they are stored in."""
    for parameter, dtype in zip(learner.parameters, learner.dtypes, strict=True):
        parameter.copy_(parameter.to(dtype))


@torch.no_grad()
def _exchange(learner: Learner, others: Sequence[torch.Tensor]) -> None:
    """Exchange the values of the parameters with those of `others`."""
    for parameter, other in zip(learner.parameters, others, strict=True):
        values = parameter.clone()
        parameter.copy_(other)
        other.copy_(values)
