"""What is trained: the numbers that may move, and the logits that they give.

    a draft model              its own forward pass
    an early exit's adapter    behind the target's first layers
    a head                     `heads`

What drafts in the target learns from what the target's layers compute; the target is beside it and does not move. Not
here: the loss (`distillation`), the steps (`training`), files (`version`).
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
from specdec.learning.samples import Batch
from specdec.settings.draft_specs import LocalDraftSpec


class Learner(Protocol):
    """One draft that is being trained."""

    parameters: Sequence[torch.Tensor]
    """What moves, in float32."""
    dtypes: Sequence[torch.dtype]
    """That each of them is stored in."""
    width: int
    """Of its hidden state."""

    def depths(self, batch: Batch) -> Iterator[tuple[torch.Tensor, Batch]]:
        """What it says at the places of a batch, by how many draft tokens stand before: none, one, ...

        Yields:
            float32 [M, V] logits, and the part of the batch with the M places that they are of.
        """
        ...


class DraftModel(Learner):
    """A causal language model of Transformers. A draft token is a token like any other, so there is one depth."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """`model`: in float32, without dropout. `dtype`: that it is stored in."""
        self.model = model
        self.parameters = list(model.parameters())
        self.dtypes = [dtype] * len(self.parameters)
        self.width = width_of(model)

    def depths(self, batch: Batch) -> Iterator[tuple[torch.Tensor, Batch]]:
        """See `Learner.depths`."""
        yield _at_places(self.model, batch), batch


class ExitAdapter(Learner):
    """The map between a target's norm and head, after its first layers; every draft token is made in the same way."""

    def __init__(self, spec: LocalDraftSpec, target: PreTrainedModel, vocabulary_size: int) -> None:
        """Begins with the adapter that `spec` names, or with one that changes nothing.

        Args:
            spec: of an early exit.
            target: in float32.
            vocabulary_size: of its tokens.

        Raises:
            InvalidRequest: as `load_early_exit`.
            Unsupported: the target's layers are not one list of modules.
        """
        stored = load_early_exit(spec, target).adapter
        self.width = width_of(target)
        weight = torch.eye(self.width) if stored is None else stored.weight.clone()
        bias = torch.zeros(self.width) if stored is None else stored.bias.clone()
        self.tensors = {"weight": weight.requires_grad_(), "bias": bias.requires_grad_()}
        """By the names that they are stored under."""
        self.parameters = list(self.tensors.values())
        self.dtypes = [torch.float32] * len(self.parameters)
        self.fingerprint = HeadFile(Path(spec.path), {}, self.tensors).fingerprint()
        """Of what it begins with."""
        self._model = shortened(target, EarlyExit(spec.num_layers, Adapter(weight, bias)))
        self._vocabulary_size = vocabulary_size

    def depths(self, batch: Batch) -> Iterator[tuple[torch.Tensor, Batch]]:
        """See `Learner.depths`."""
        yield _at_places(self._model, batch)[:, : self._vocabulary_size], batch


def width_of(model: PreTrainedModel) -> int:
    """Of a model's embeddings."""
    return cast(nn.Embedding, model.get_input_embeddings()).weight.shape[1]


def _at_places(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """One forward pass: [M, rows of the head] float32."""
    logits: torch.Tensor = model(input_ids=torch.from_numpy(batch.token_ids), use_cache=False).logits  # [B, T, V]
    return logits.flatten(0, 1)[torch.from_numpy(batch.places)].float()
