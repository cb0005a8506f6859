"""The tokens that a head names: all of the target's, or a chosen few under numbers of their own.

A head with a small vocabulary gives the rest no probability, which is exact: q is then 0 there. Two ways of writing it
are read: a list of target ids (`token_map`, Medusa) and offsets (`d2t`, EAGLE-3: target id = i + d2t[i], with `t2d` as
the mask of the ids that are named). Not a map between tokenizers: both sides have the target's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.engine.heads.base import TargetParts
from specdec.engine.heads.head_file import HeadFile, refusal


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Which tokens a head's logits are of."""

    size: int
    """Logits that the head gives."""
    target_size: int
    num_rows: int
    """Of the target's own head: at least `target_size`; rows beyond it belong to no token."""
    target_ids: torch.Tensor | None
    """int64 [size]: the target's ids; None: they are the same."""

    @classmethod
    def of_token_map(cls, file: HeadFile, target: TargetParts) -> DraftVocabulary:
        """As `token_map` says; without one, all tokens. Raises InvalidRequest: it is no map into the target's."""
        if "token_map" not in file.tensors:
            return cls(target.vocabulary_size, target.vocabulary_size, len(target.head), None)
        return cls._chosen(file, "token_map", file.take("token_map", None), target)

    @classmethod
    def of_offsets(cls, file: HeadFile, size: int, target: TargetParts) -> DraftVocabulary:
        """As `d2t` says; without one, all tokens.

        Args:
            file: with `d2t` and, where it is stored, `t2d`.
            size: logits that the head gives.
            target: whose tokens they are.

        Raises:
            InvalidRequest: `d2t` is no map into the target's tokens, or does not agree with `t2d`.
        """
        if "d2t" not in file.tensors:
            if size < target.vocabulary_size:
                raise refusal(
                    f"{file.path} names {size} of the target's {target.vocabulary_size} tokens and lacks the tensor "
                    "d2t, which says which"
                )
            return cls(size, target.vocabulary_size, len(target.head), None)
        offsets = file.take("d2t", size)
        if offsets.is_floating_point():
            raise refusal(f"{file.path}: the tensor d2t is not of whole numbers")
        vocabulary = cls._chosen(file, "d2t", torch.arange(size) + offsets, target)
        if "t2d" in file.tensors:
            named = file.take("t2d", None).bool().nonzero()[:, 0]
            if not torch.equal(named, torch.sort(torch.arange(size) + offsets).values):
                raise refusal(f"{file.path}: the tensors d2t and t2d name different tokens")
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
        """[T, size] -> float32 [T, target_size], -inf for tokens that the head does not name."""
        if self.target_ids is None:
            return logits[:, : self.target_size].float()
        wide = torch.full((len(logits), self.num_rows), -torch.inf, device=logits.device)
        wide[:, self.target_ids] = logits.float()
        return wide[:, : self.target_size]
