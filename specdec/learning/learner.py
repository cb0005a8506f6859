"""The kinds of drafts that can be trained: each has trainable parameters and computes logits from them.

    a draft model              its own forward pass
    an early-exit adapter      after the target's first layers
    a head                     `heads`

Adapters and heads draft inside the target and learn from the outputs of its layers. The target itself is not trained.
`training` runs the steps with the loss of `training`; `trained_model` stores the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.heads.head_file import HeadFile
from specdec.engine.model.early_exit import Adapter, EarlyExit, load_early_exit, shortened
from specdec.learning.samples import TrainingBatch
from specdec.settings.draft_specs import LocalDraftSpec


class Learner(Protocol):
    """A draft in training."""

    parameters: Sequence[torch.Tensor]
    """Trainable tensors, in float32."""
    dtypes: Sequence[torch.dtype]
    """Dtype in which each parameter is stored."""
    width: int
    """Size of the hidden state."""

    def depths(self, batch: TrainingBatch) -> Iterator[tuple[torch.Tensor, TrainingBatch]]:
        """Compute the draft's logits at the places of a batch, for one draft depth after the other.

        The depth is the number of draft tokens of the same round before the place: 0, 1, ...

        Yields:
            Logits, float32 [M, V], and the part of the batch that has these M places.
        """
        ...


class DraftModel(Learner):
    """A causal language model of transformers. It treats draft tokens like all others, so it has one depth."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """
        Args:
            model: the draft model in float32, without dropout.
            dtype: dtype in which it is stored.
        """
        self.model = model
        self.parameters = list(model.parameters())
        self.dtypes = [dtype] * len(self.parameters)
        self.width = width_of(model)

    def depths(self, batch: TrainingBatch) -> Iterator[tuple[torch.Tensor, TrainingBatch]]:
        """See `Learner.depths`."""
        yield _at_places(self.model, batch), batch


class ExitAdapter(Learner):
    """A linear map after the target's first layers, between its final norm and its head. It has one draft depth."""

    def __init__(self, spec: LocalDraftSpec, target: PreTrainedModel, vocabulary_size: int) -> None:
        """Start from the adapter that `spec` names, or from the identity.

        Args:
            spec: specification of an early exit.
            target: target model in float32.
            vocabulary_size: vocabulary size of the target.

        Raises:
            InvalidRequest: see `load_early_exit`.
            Unsupported: the target's layers are not one list of modules.
        """
        stored = load_early_exit(spec, target).adapter
        self.width = width_of(target)
        weight = torch.eye(self.width) if stored is None else stored.weight.clone()
        bias = torch.zeros(self.width) if stored is None else stored.bias.clone()
        self.tensors = {"weight": weight.requires_grad_(), "bias": bias.requires_grad_()}
        """The adapter's tensors, by the names they are stored under."""
        self.parameters = list(self.tensors.values())
        self.dtypes = [torch.float32] * len(self.parameters)
        self.fingerprint = HeadFile(Path(spec.path), {}, self.tensors).fingerprint()
        """Fingerprint of the adapter before training."""
        self._model = shortened(target, EarlyExit(spec.num_layers, Adapter(weight, bias)))
        self._vocabulary_size = vocabulary_size

    def depths(self, batch: TrainingBatch) -> Iterator[tuple[torch.Tensor, TrainingBatch]]:
        """See `Learner.depths`."""
        yield _at_places(self._model, batch)[:, : self._vocabulary_size], batch


def width_of(model: PreTrainedModel) -> int:
    """Return the size of a model's token embeddings."""
    return cast(nn.Embedding, model.get_input_embeddings()).weight.shape[1]


def _at_places(model: PreTrainedModel, batch: TrainingBatch) -> torch.Tensor:
    """Run one forward pass and return the logits at the places of a batch.  -> float32 [M, rows of the LM head]"""
    logits: torch.Tensor = model(input_ids=torch.from_numpy(batch.token_ids), use_cache=False).logits  # [B, T, V]
    return logits.flatten(0, 1)[torch.from_numpy(batch.places)].float()
