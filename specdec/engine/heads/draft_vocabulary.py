"""Draft vocabulary of a head: all tokens of the target, or a subset with ids of its own.

A head with a small vocabulary gives the other tokens probability 0, which is exact: q is 0 there. Two formats are read:
a list of target ids (`token_map`, Medusa) and offsets (`d2t`, EAGLE-3: target id = i + d2t[i], where `t2d` is the mask
of the ids in the subset). Both vocabularies are of the target's tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.engine.heads.head_file import HeadFile, refusal
from specdec.engine.heads.interface import TargetParts


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Tokens of a head's logits."""

    size: int
    """Number of logits that the head gives."""
    target_size: int
    num_rows: int
    """Rows of the target's own head, at least `target_size`; rows beyond it belong to no token."""
    target_ids: torch.Tensor | None
    """int64 [size]: the target's ids; None if the ids are the same."""

    @classmethod
    def of_token_map(cls, file: HeadFile, target: TargetParts) -> DraftVocabulary:
        """Return the tokens of `token_map`, or all tokens without it. Raises InvalidRequest: the map is invalid."""
        if "token_map" not in file.tensors:
            return cls(target.vocabulary_size, target.vocabulary_size, len(target.head), None)
        return cls._chosen(file, "token_map", file.take("token_map", None), target)

    @classmethod
    def of_offsets(cls, file: HeadFile, size: int, target: TargetParts) -> DraftVocabulary:
        """Return the tokens of `d2t`, or all tokens without it.

        Args:
            file: file that may contain `d2t` and `t2d`.
            size: number of logits that the head gives.
            target: target of the head.

        Raises:
            InvalidRequest: `d2t` does not map into the target's tokens, or does not agree with `t2d`.
        """
        if "d2t" not in file.tensors:
            if size < target.vocabulary_size:
                raise refusal(
                    f"{file.path} has logits of {size} of the target's {target.vocabulary_size} tokens and lacks the "
                    "tensor d2t, which lists the tokens"
                )
            return cls(size, target.vocabulary_size, len(target.head), None)
        offsets = file.take("d2t", size)
        if offsets.is_floating_point():
            raise refusal(f"{file.path}: the tensor d2t does not hold integers")
        vocabulary = cls._chosen(file, "d2t", torch.arange(size) + offsets, target)
        if "t2d" in file.tensors:
            named = file.take("t2d", None).bool().nonzero()[:, 0]
            if not torch.equal(named, torch.sort(torch.arange(size) + offsets).values):
                raise refusal(f"{file.path}: the tensors d2t and t2d list different tokens")
        return vocabulary

    @classmethod
    def _chosen(cls, file: HeadFile, name: str, ids: torch.Tensor, target: TargetParts) -> DraftVocabulary:
        if ids.is_floating_point() or not len(ids):
            raise refusal(f"{file.path}: the tensor {name} is not a list of token ids")
        ids = ids.long()
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= len(target.head):
            raise refusal(
                f"{file.path}: the tensor {name} names token {lowest if lowest < 0 else highest}, and the target has "
                f"{len(target.head)}"
            )
        if len(torch.unique(ids)) < len(ids):
            raise refusal(f"{file.path}: the tensor {name} names a token twice")
        return cls(len(ids), target.vocabulary_size, len(target.head), ids.to(target.device))

    def widen(self, logits: torch.Tensor) -> torch.Tensor:
        """Map logits [T, size] to float32 [T, target_size], with -inf for tokens that the head does not have."""
        if self.target_ids is None:
            return logits[:, : self.target_size].float()
        wide = torch.full((len(logits), self.num_rows), -torch.inf, device=logits.device)
        wide[:, self.target_ids] = logits.float()
        return wide[:, : self.target_size]
