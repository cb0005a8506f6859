"""Medusa (Cai et al. 2024, arXiv:2401.10774): residual blocks on the last hidden state, one head for each draft token.

Head i (from 0) reads the feature of the last position that the target has run and gives the distribution of the token
i + 2 places after it. The target's own head gave the token directly after it, which is committed by then. The heads do
not see the tokens between, so gamma is at most their number and acceptance falls with depth. They do not attend.

Two formats are read: the original files (`medusa_lm_head.pt` or `.safetensors`: HEAD.LAYER.linear.weight and .bias,
then HEAD.LAYERS.weight) and vLLM's (`blocks.HEAD.layers.LAYER.weight`, `lm_heads.HEAD.weight`, `token_map`). The
numbers of heads and layers are counted from the tensors, because published configurations are often wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from specdec.engine.heads.draft_vocabulary import DraftVocabulary
from specdec.engine.heads.head_file import HeadFile, refusal
from specdec.engine.heads.interface import DraftHead, HeadDraft, HeadTokens, TargetParts
from specdec.engine.linear.projection import Projection

_PREFIXES = re.compile(r"^(?:medusa_heads?|base_model\.medusa_head)\.")
_ORIGINAL = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")


@dataclass(frozen=True, slots=True)
class _Head:
    """One head: x -> x + silu(block(x)) for each block, then the logits."""

    blocks: tuple[Projection, ...]
    logits: Projection

    def __call__(self, feature: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            feature = feature + silu(block(feature))
        logits: torch.Tensor = self.logits(feature)
        return logits


class Medusa(DraftHead):
    """`engine.heads.interface.DraftHead` of Medusa heads."""

    kv_layers = ()

    def __init__(self, file: HeadFile, target: TargetParts) -> None:
        """Make the heads of a file for a target.

        Raises:
            InvalidRequest: a tensor is missing or does not fit the target.
        """
        self.feature_layers = (target.config.num_hidden_layers - 1,)
        self.feature_size = target.embedding.shape[1]
        self._norm = target.norm
        # Taken before the tensors are renamed.
        self.fingerprint = file.fingerprint()
        file.rename(lambda name: _PREFIXES.sub("", name))
        self._vocabulary = DraftVocabulary.of_token_map(file, target)
        read = _read_vllm_head if any(_BLOCK.fullmatch(name) for name in file.tensors) else _read_original_head
        num_heads = _count_heads(file)
        self._heads = [read(file, target, index, self._vocabulary.size) for index in range(num_heads)]
        self.max_draft_tokens = num_heads

    def features(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the input [T, H] of the target's own head."""
        return self._norm(hidden[0])

    def extend(self, tokens: HeadTokens) -> None:
        """Do nothing: these heads do not attend."""

    def draft(self, tokens: HeadTokens, verified: torch.Tensor, draft_index: torch.Tensor) -> HeadDraft:
        """Run one draft step; see `DraftHead.draft`."""
        depths = draft_index.tolist()
        rows = verified.new_empty(len(depths), self._vocabulary.size)
        for depth in set(depths):
            chosen = (draft_index == depth).nonzero()[:, 0]
            rows[chosen] = self._heads[depth](verified[chosen])
        return HeadDraft(None, self._vocabulary.widen(rows))


def _count_heads(file: HeadFile) -> int:
    """Return the number of heads. Raises InvalidRequest: there are none, or one is missing between them."""
    found = {int(match[1]) for name in file.tensors if (match := _ORIGINAL.fullmatch(name) or _BLOCK.fullmatch(name))}
    found |= {int(match[1]) for name in file.tensors if (match := re.fullmatch(r"lm_heads\.(\d+)\.weight", name))}
    if not found:
        raise refusal(
            f"{file.path} has no Medusa head: it lacks the tensors 0.0.linear.weight and blocks.0.layers.0.weight"
        )
    if len(found) <= max(found):  # a name may say any number
        gap = next(head for head in range(len(found)) if head not in found)
        raise refusal(f"{file.path} lacks Medusa head {gap} of {max(found) + 1}")
    return len(found)


def _count_layers(file: HeadFile, pattern: re.Pattern[str], head: int) -> int:
    return sum((match := pattern.fullmatch(name)) is not None and int(match[1]) == head for name in file.tensors)


def _read_original_head(file: HeadFile, target: TargetParts, head: int, draft_size: int) -> _Head:
    width = target.embedding.shape[1]
    num_layers = _count_layers(file, _ORIGINAL, head)
    blocks = tuple(
        target.project(
            file.weight(target, f"{head}.{layer}.linear.weight", width, width),
            file.weight(target, f"{head}.{layer}.linear.bias", width),
        )
        for layer in range(num_layers)
    )
    return _Head(blocks, _logits(file, target, f"{head}.{num_layers}.weight", draft_size))


def _read_vllm_head(file: HeadFile, target: TargetParts, head: int, draft_size: int) -> _Head:
    width = target.embedding.shape[1]
    blocks = []
    for layer in range(_count_layers(file, _BLOCK, head)):
        name = f"blocks.{head}.layers.{layer}"
        bias = file.weight(target, f"{name}.bias", width) if f"{name}.bias" in file.tensors else None
        blocks.append(target.project(file.weight(target, f"{name}.weight", width, width), bias))
    own = f"lm_heads.{head}.weight"
    # With `original_lm_head` all heads share one, which is stored once.
    shared = next((name for name in ("lm_head.weight", "lm_heads.0.weight") if name in file.tensors), own)
    return _Head(tuple(blocks), _logits(file, target, own if own in file.tensors else shared, draft_size))


def _logits(file: HeadFile, target: TargetParts, name: str, draft_size: int) -> Projection:
    """Return the projection to a head's logits, in the draft vocabulary."""
    width = target.embedding.shape[1]
    rows = file.take(name, None, width).shape[0]
    if rows > draft_size and "token_map" in file.tensors:
        # The tensor was written before the map was chosen, so the map selects its rows.
        chosen = file.take("token_map", draft_size).long()
        if int(chosen.max()) >= rows:
            raise refusal(f"{file.path}: the tensor token_map names row {int(chosen.max())} of {rows} of {name}")
        file.tensors[name] = file.take(name, rows, width)[chosen]
    elif "token_map" not in file.tensors and rows >= target.vocabulary_size:
        file.tensors[name] = file.take(name, rows, width)[:draft_size]
    return target.project(file.weight(target, name, draft_size, width), None)
