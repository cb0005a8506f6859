"""Measure how far a draft's distributions are from the target's logged ones, in PyTorch.

A logged distribution has entries for the target's top tokens and one tail mass for all others. The divergence compares
the entries and the tail masses; it is smallest when the draft matches all of them. A token outside the draft's
vocabulary counts towards the tail mass. `training` minimises the divergence and reports the acceptance.
"""

from __future__ import annotations

import numpy as np
import torch

from specdec.learning.samples import TrainingBatch

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
