"""Train a Medusa or EAGLE-3 head through the code that serves it (`specdec.engine.heads`).

Formats, vocabularies and arithmetic are therefore the same in training and in service. All positions of a row draft at
once. At depth 0 each position runs its token with the target's feature of the previous position, as the first draft
step of a round does. At depth i it runs with what depth i - 1 computed for the previous position. It attends to keys
made from the target's features up to i positions back and, after those, to the keys of earlier depths, which is what
draft token i of a round that starts there would see. (EAGLE-3's "training-time test", arXiv:2503.01840.)

In service, `engine.heads.paged_head` provides the attention over a paged cache instead. Called by `distill`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import PreTrainedModel

from specdec.engine.heads.factory import head_of_file
from specdec.engine.heads.head_file import HeadFile
from specdec.engine.heads.interface import Attend, DraftHead, HeadTokens, TargetParts
from specdec.engine.linear.projection import Projection
from specdec.engine.local_drafting import target_parts
from specdec.engine.model.early_exit import decoder_layers
from specdec.learning.learner import Learner, width_of
from specdec.learning.samples import ROW_TOKENS, TrainingBatch

#: Number of draft depths that a head with attention is trained for. A head without attention trains every depth it has.
MAX_DEPTHS = 3

#: Score of a masked key: its weight is 0 in a softmax with any other key.
_HIDDEN = -1e9


class Head(Learner):
    """A head in training. Implements `learner.Learner`."""

    def __init__(self, kind: str, file: HeadFile, target: PreTrainedModel, vocabulary_size: int) -> None:
        """Start from the head that a file holds.

        Args:
            kind: medusa or eagle3.
            file: file with the head.
            target: target model in float32; it is not trained.
            vocabulary_size: vocabulary size of the target.

        Raises:
            InvalidRequest: the head does not fit the target.
        """
        self._kind, self._target, self._path = kind, target, file.path
        self.fingerprint = file.fingerprint()
        """Fingerprint of the head before training."""
        self.config = file.config
        """Configuration that is stored beside the tensors; {} if there is none."""
        self.width = width_of(target)
        self._parts = replace(target_parts(target, vocabulary_size, ROW_TOKENS), project=_LearnedProjection)
        # Building the head once from the file's tensors checks that they form a valid head with finite values.
        head = head_of_file(kind, HeadFile(file.path, file.config, dict(file.tensors)), self._parts)
        self._num_depths = MAX_DEPTHS if head.kv_layers else head.max_draft_tokens
        self._tensors = {name: _learned(name, tensor) for name, tensor in file.tensors.items()}
        self._stored_as = {name: tensor.dtype for name, tensor in file.tensors.items()}
        learned = [name for name, tensor in self._tensors.items() if tensor.requires_grad]
        self.parameters = [self._tensors[name] for name in learned]
        self.dtypes = [self._stored_as[name] for name in learned]
        self._seen: tuple[object, list[torch.Tensor]] = (None, [])

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of the head by name, each in the dtype it was stored in."""
        return {name: tensor.detach().to(self._stored_as[name]) for name, tensor in self._tensors.items()}

    def depths(self, batch: TrainingBatch) -> Iterator[tuple[torch.Tensor, TrainingBatch]]:
        """See `Learner.depths`."""
        token_ids = torch.from_numpy(batch.token_ids)  # [B, T]
        head, rows = self._made(), _Rows(*token_ids.shape)
        if self._seen[0] is not batch.token_ids:  # the target's outputs are cached: they do not change in training
            self._seen = batch.token_ids, self._hidden(token_ids, head.feature_layers)
        features = head.features(self._seen[1])  # [B * T, F]
        attention = _Attention(head, rows)
        previous = rows.moved(features, 1)
        for depth in range(self._num_depths):
            tokens = HeadTokens(token_ids.flatten(), rows.positions, previous, attention.at(depth))
            draft_index = torch.full_like(rows.positions, depth)
            draft = head.draft(tokens, rows.moved(features, depth + 1), draft_index)
            drafted = batch.beyond(depth)
            yield draft.logits[torch.from_numpy(drafted.places)].float(), drafted
            if draft.features is not None:
                previous = rows.moved(draft.features, 1)

    def _made(self) -> DraftHead:
        """Build the head from the current values of the parameters."""
        return head_of_file(self._kind, _LearnedFile(self._path, self.config, dict(self._tensors)), self._parts)

    @torch.no_grad()
    def _hidden(self, token_ids: torch.Tensor, layers: Sequence[int]) -> list[torch.Tensor]:
        """Return the outputs of the given target layers, [B * T, H] each."""
        outputs: list[torch.Tensor] = []

        def note(_module: nn.Module, _inputs: object, output: Any) -> None:
            outputs.append((output[0] if isinstance(output, tuple) else output).flatten(0, 1))

        with ExitStack() as ending:
            for layer in layers:
                ending.callback(decoder_layers(self._target)[layer].register_forward_hook(note).remove)
            self._target.base_model(input_ids=token_ids, use_cache=False)
        return outputs


class _LearnedFile(HeadFile):
    """The tensors of a head in training. They are not checked for finite values again, unlike those of a file."""

    def weight(self, target: TargetParts, name: str, *shape: int | None) -> torch.Tensor:
        return self.take(name, *shape)

    def fingerprint(self) -> str:
        return ""


class _Rows:
    """Shape of B rows of T positions that are stored one after the other."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.shape = num_rows, width
        self.positions = torch.arange(width).repeat(num_rows)  # [B * T]

    def moved(self, numbers: torch.Tensor, count: int) -> torch.Tensor:
        """Shift values by `count` positions within each row and fill the start with zeros.  [B * T, F] -> [B * T, F]"""
        apart = numbers.unflatten(0, self.shape)
        return torch.cat((torch.zeros_like(apart[:, :count]), apart[:, :-count]), dim=1).flatten(0, 1)


class _Attention:
    """Attention of all positions at each depth. Keys and values of earlier depths are kept."""

    def __init__(self, head: DraftHead, rows: _Rows) -> None:
        self._shapes = [shape for shape, _ in head.kv_layers]
        self._rows = rows
        self._kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self._shapes]

    def at(self, depth: int) -> Attend:
        """Return the attention function of one depth; see `engine.heads.interface.Attend`."""

        def attend(layer: int, query: torch.Tensor, kv_rows: torch.Tensor, scale: float) -> torch.Tensor:
            shape, kept = self._shapes[layer], self._kept[layer]
            sizes = [shape.num_kv_heads * dim for dim in (shape.key_dim, shape.value_dim)]
            group = query.shape[1] // shape.num_kv_heads
            keys, values = (
                part.unflatten(1, (shape.num_kv_heads, -1)).repeat_interleave(group, 1)
                for part in kv_rows.split(sizes, dim=1)
            )  # [B * T, heads, dim]
            query, keys, values = (self._by_head(part) for part in (query, keys, values))
            kept.append((keys, values))
            attended = self._attended(query, kept, depth, scale)  # [B, heads, T, dim]
            return attended.transpose(1, 2).flatten(0, 1)

        return attend

    def _by_head(self, part: torch.Tensor) -> torch.Tensor:
        """Rearrange by rows and heads: [B * T, heads, dim] -> [B, heads, T, dim]."""
        apart: torch.Tensor = part.unflatten(0, self._rows.shape).transpose(1, 2)
        return apart

    def _attended(
        self, query: torch.Tensor, kept: Sequence[tuple[torch.Tensor, torch.Tensor]], depth: int, scale: float
    ) -> torch.Tensor:
        """Attend from every position.  -> [B, heads, T, dim]

        Position t sees the depth-0 keys up to position t - `depth`, and of each later depth d the key of position
        t - `depth` + d.
        """
        keys, values = kept[0]
        if depth == 0:
            first: torch.Tensor = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
            return first
        place = torch.arange(query.shape[2])
        scores = (query @ keys.transpose(2, 3) * scale).masked_fill(place > place[:, None] - depth, _HIDDEN)
        own = [[part.roll(depth - later, dims=2) for part in kept[later]] for later in range(1, depth + 1)]
        own_scores = torch.stack([(query * key).sum(-1) * scale for key, _ in own], dim=-1)  # [B, heads, T, depth]
        shares = torch.cat((scores, own_scores), dim=-1).softmax(-1)
        seen: torch.Tensor = shares[..., : len(place)] @ values
        for index, (_, value) in enumerate(own):
            seen = seen + shares[..., len(place) + index, None] * value
        return seen


class _LearnedProjection(Projection):
    """A projection that gradients pass through. It uses the weight as it is, without a layout for fast kernels."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self._learned, self.bias = weight, bias

    @property
    def weight(self) -> torch.Tensor:
        return self._learned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._learned, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual + self.forward(x)


def _learned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a trainable float32 copy of a tensor.

    Integer tensors (token maps) are returned unchanged. The embedding table is copied without gradients, because it
    must stay equal to the target's.
    """
    if not tensor.is_floating_point():
        return tensor
    return tensor.float().clone().requires_grad_(not name.endswith("embed_tokens.weight"))
