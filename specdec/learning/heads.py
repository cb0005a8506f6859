"""A head that learns: Medusa or EAGLE-3, through the code that serves it (`specdec.engine.heads`).

All positions of a row draft at once. At depth 0 each runs its token with the feature of the position before, as the
first draft step of a round would; at depth i with what depth i - 1 gave for the position before, and sees keys of the
target's features up to i positions back, and of its own from there on: what the i-th draft token of a round begun there
would see. (EAGLE-3's "training-time test", arXiv:2503.01840.) So formats, vocabularies and arithmetic are served as
they were trained. Not here: the paged cache of a service (`engine.heads.paged_head`). Called by `distill`.
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

from specdec.engine.heads.base import Attend, DraftHead, HeadTokens, TargetParts
from specdec.engine.heads.factory import head_of_file
from specdec.engine.heads.head_file import HeadFile
from specdec.engine.linear.projection import Projection
from specdec.engine.local_drafting import target_parts
from specdec.engine.model.early_exit import decoder_layers
from specdec.learning.learner import Learner, width_of
from specdec.learning.samples import ROW_TOKENS, Batch

#: Depths that a head learns which attends; one that does not learns all that it has heads for.
MAX_DEPTHS = 3

#: Nobody sees this score beside another.
_HIDDEN = -1e9


class Head(Learner):
    """Implements `learner.Learner`."""

    def __init__(self, kind: str, file: HeadFile, target: PreTrainedModel, vocabulary_size: int) -> None:
        """Begins with the head of a file.

        Args:
            kind: medusa or eagle3.
            file: with it.
            target: in float32; it does not move.
            vocabulary_size: of its tokens.

        Raises:
            InvalidRequest: it does not fit the target.
        """
        self._kind, self._target, self._path = kind, target, file.path
        self.fingerprint = file.fingerprint()
        """Of what it begins with."""
        self.config = file.config
        """What stands beside its tensors; {} where nothing does."""
        self.width = width_of(target)
        self._parts = replace(target_parts(target, vocabulary_size, ROW_TOKENS), project=_LearnedProjection)
        # Whether it is one, and of finite numbers: once, before they move.
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
        """As it is stored: by name, in the numbers that each came in."""
        return {name: tensor.detach().to(self._stored_as[name]) for name, tensor in self._tensors.items()}

    def depths(self, batch: Batch) -> Iterator[tuple[torch.Tensor, Batch]]:
        """See `Learner.depths`."""
        token_ids = torch.from_numpy(batch.token_ids)  # [B, T]
        head, rows = self._made(), _Rows(*token_ids.shape)
        if self._seen[0] is not batch.token_ids:  # what the target makes of them does not change
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
        """The head of the numbers as they are now."""
        return head_of_file(self._kind, _LearnedFile(self._path, self.config, dict(self._tensors)), self._parts)

    @torch.no_grad()
    def _hidden(self, token_ids: torch.Tensor, layers: Sequence[int]) -> list[torch.Tensor]:
        """The outputs of the target's layers, [B * T, H] each."""
        outputs: list[torch.Tensor] = []

        def note(_module: nn.Module, _inputs: object, output: Any) -> None:
            outputs.append((output[0] if isinstance(output, tuple) else output).flatten(0, 1))

        with ExitStack() as ending:
            for layer in layers:
                ending.callback(decoder_layers(self._target)[layer].register_forward_hook(note).remove)
            self._target.base_model(input_ids=token_ids, use_cache=False)
        return outputs


class _LearnedFile(HeadFile):
    """Tensors that move; whether they are finite was looked at before they did."""

    def weight(self, target: TargetParts, name: str, *shape: int | None) -> torch.Tensor:
        return self.take(name, *shape)

    def fingerprint(self) -> str:
        return ""


class _Rows:
    """B rows of T positions, one after the other."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.shape = num_rows, width
        self.positions = torch.arange(width).repeat(num_rows)  # [B * T]

    def moved(self, numbers: torch.Tensor, count: int) -> torch.Tensor:
        """[B * T, F]: those of the position so many places before; zeros where there is none."""
        apart = numbers.unflatten(0, self.shape)
        return torch.cat((torch.zeros_like(apart[:, :count]), apart[:, :-count]), dim=1).flatten(0, 1)


class _Attention:
    """What all positions see, depth after depth. Keys and values of earlier depths are kept."""

    def __init__(self, head: DraftHead, rows: _Rows) -> None:
        self._shapes = [shape for shape, _ in head.kv_layers]
        self._rows = rows
        self._kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self._shapes]

    def at(self, depth: int) -> Attend:
        """See `engine.heads.base.Attend`."""

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
        """[B * T, heads, dim] -> [B, heads, T, dim]"""
        apart: torch.Tensor = part.unflatten(0, self._rows.shape).transpose(1, 2)
        return apart

    def _attended(
        self, query: torch.Tensor, kept: Sequence[tuple[torch.Tensor, torch.Tensor]], depth: int, scale: float
    ) -> torch.Tensor:
        """Position t sees what depth 0 left up to t - `depth`, and of each later depth d that of t - `depth` + d."""
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
    """A product that gradients go through: the weight as it is, laid out for nothing."""

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
    """A copy that may move. Maps of tokens are no numbers, and a table of embeddings stays what the target reads."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.float().clone().requires_grad_(not name.endswith("embed_tokens.weight"))
