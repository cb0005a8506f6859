"""How far a draft's distributions are from what the target said, in PyTorch.

A logged distribution names its likeliest tokens and leaves the rest as one: so does the divergence, which is smallest
where the draft agrees with all of it. What a draft has no word for counts as the rest. Not here: where the numbers come
from (`samples`), the steps (`training`).
"""

from __future__ import annotations

import numpy as np
import torch

from specdec.learning.samples import Batch

#: Least share of the rest that a draft is held to: below it a rounding error would be learned.
_LEAST_REST = 1e-6


#: Below it a distribution is all but a choice: divided by it, one request's logits would outweigh all others'.
_LEAST_TEMPERATURE = 0.1


def divergence(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """KL(target || draft) in nats a token, over the entries and the rest as one.  [M, V] -> [M]

    At temperature 0 it is the draft's surprise at the target's choice.
    """
    log_q = _entry_log_q(logits, batch)
    has_no_word = log_q == -torch.inf
    p = torch.from_numpy(batch.shares).masked_fill(has_no_word, 0.0)
    log_q = log_q.masked_fill(has_no_word, 0.0)  # infinity times nothing is no number
    rest_p = (1.0 - p.sum(-1)).clamp_min(0.0)
    rest_q = (1.0 - (log_q.exp() * (p > 0)).sum(-1)).clamp_min(_LEAST_REST)
    of_entries = (torch.xlogy(p, p) - p * log_q).sum(-1)
    return of_entries + torch.xlogy(rest_p, rest_p) - rest_p * rest_q.log()


def acceptance(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Chance that a token drawn from the draft is accepted, as far as the entries tell.  [M, V] -> [M]

    The sum of min(p, q); what both have in the rest is not in it. At temperature 0, whether the choices are the same.
    """
    is_greedy = torch.from_numpy(batch.temperatures == 0.0)
    agrees = logits.argmax(-1) == torch.from_numpy(batch.entry_ids[:, 0])
    overlap = torch.minimum(_entry_log_q(logits, batch).exp(), torch.from_numpy(batch.shares)).sum(-1)
    return torch.where(is_greedy, agrees.float(), overlap)


def _entry_log_q(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[M, K]"""
    temperatures = np.where(batch.temperatures > 0.0, np.maximum(batch.temperatures, _LEAST_TEMPERATURE), 1.0)
    scaled = logits / torch.from_numpy(temperatures.astype(np.float32))[:, None]
    return scaled.gather(-1, torch.from_numpy(batch.entry_ids)) - scaled.logsumexp(-1, keepdim=True)
