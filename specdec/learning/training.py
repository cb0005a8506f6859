"""Trains one draft on one tenant's learning log, for a time that was given.

The draft begins as it is served. What is logged meanwhile is taken in at the next pass. Not here: the loss
(`distillation`), the file that becomes of it (`version`). Called by `specdec distill`, in a process of its own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.learning.distillation import acceptance, divergence, learned_logits
from specdec.learning.samples import Batch, Row, Samples, batches_of

#: Rates are for matrices of this width in all; wider drafts learn in smaller steps.
_RATE_TIMES_WIDTH = 0.2

_WARMUP_SHARE = 0.05
_LAST_RATE_SHARE = 0.02
_LARGEST_GRADIENT = 1.0

#: Held-out tokens that are looked at before and after, at most.
_MAX_HELD_OUT_TOKENS = 20_000


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
    """Mean KL(target || draft) a token."""
    acceptance: float
    """Expected share of its tokens that are accepted, at least."""


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
    model: torch.nn.Module,
    samples: Samples,
    plan: TrainingPlan,
    on_step: Callable[[int, float, float], None] = lambda num_steps, kl_nats, done: None,
) -> Learned:
    """Trains `model` in place.

    Args:
        model: a causal language model of Transformers, in float32.
        samples: read on while it goes.
        plan: of it.
        on_step: told after each step how many there were, its KL, and how much is done, 0..1.
    """
    began, num_steps, done = time.monotonic(), 0, 0.0
    as_it_was = copy.deepcopy(model)
    dice = np.random.default_rng(plan.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    highest = plan.learning_rate or _RATE_TIMES_WIDTH / _width(model)
    model.train()
    while done < 1.0:
        for batch in samples.batches(plan.batch_tokens, dice):
            computed_s = time.process_time()
            rate = highest * min(1.0, done / _WARMUP_SHARE + 0.01) * max(_LAST_RATE_SHARE, 1.0 - done)
            kl_nats = _step(model, optimizer, batch, rate)
            num_steps += 1
            # Not by the clock: while others have the machine, or it is stopped, it takes nothing from anybody.
            computed_s = (time.process_time() - computed_s) / torch.get_num_threads()
            time.sleep(computed_s * (1.0 / plan.share - 1.0))
            done = (time.monotonic() - began) / plan.seconds
            done = min(1.0, max(done, num_steps / plan.max_steps) if plan.max_steps else done)
            on_step(num_steps, kl_nats, done)
            if done >= 1.0:
                break
        else:
            samples.read_on()
    held_out = _some(samples.held_out)  # what was logged meanwhile included: the more, the surer
    return Learned(
        measure(as_it_was, held_out, plan.batch_tokens),
        measure(model, held_out, plan.batch_tokens),
        num_steps,
        sum(row.num_learned for row in samples.learned),
        sum(row.num_learned for row in held_out),
        time.monotonic() - began,
    )


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, rate: float) -> float:
    """One step at a learning rate; the KL before it, in nats a token."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = divergence(learned_logits(model, batch), batch).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_GRADIENT)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


@torch.inference_mode()
def measure(model: torch.nn.Module, rows: Sequence[Row], batch_tokens: int) -> Figures:
    """What a draft makes of `rows`, without learning from them."""
    model.eval()
    totals, count = np.zeros(2), 0
    for batch in batches_of(rows, batch_tokens):
        logits = learned_logits(model, batch)
        totals += [divergence(logits, batch).sum().item(), acceptance(logits, batch).sum().item()]
        count += len(batch.places)
    return Figures(*(totals / max(count, 1)).tolist())


def _some(rows: Sequence[Row]) -> list[Row]:
    """Rows up to a number of tokens, one at least."""
    ends = np.cumsum([row.num_learned for row in rows])
    return list(rows[: max(1, int(np.searchsorted(ends, _MAX_HELD_OUT_TOKENS)))])


def _width(model: torch.nn.Module) -> int:
    """Of its embeddings."""
    return int(model.get_input_embeddings().weight.shape[1])  # type: ignore[operator]
