"""The sizes of steps that are captured, and which of them a step fits into.

A bucket is a rectangle: so many sequences of so many rows each, with contexts of up to so many blocks. Sizes grow
geometrically, so that a few dozen buckets serve every small step. Not here: what lies in a bucket
(`engine.cuda_graphs.static_inputs`). Called by `engine.cuda_graphs.steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.engine.base import SequenceSlice
from specdec.types import BLOCK_TOKENS

_NUM_SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
#: Of one step.
MOST_SEQUENCES = _NUM_SEQUENCES[-1]
# Beyond, a step's own work outweighs what capturing saves. Its logits are allocated for good: 128 MiB with 128,000
# tokens in two bytes each.
_MOST_ROWS = 512


@dataclass(frozen=True, slots=True)
class Bucket:
    """The size of a captured step."""

    num_sequences: int
    width: int
    """Rows of each sequence."""
    num_blocks: int
    """KV blocks of each sequence."""

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.width


@dataclass(frozen=True, slots=True)
class ContextSteps:
    """Which contexts get buckets of their own: what an attention pays for one that is longer than need be."""

    first_tokens: int
    growth: int
    most_tokens: int
    """Of all sequences of a bucket together."""


class Buckets:
    """All buckets of a service."""

    def __init__(self, widths: Iterable[int], steps: ContextSteps | None, max_context_tokens: int) -> None:
        """
        Args:
            widths: rows of one sequence that steps have, such as 1 for a draft step, gamma + 1 for a verification.
            steps: the contexts; None: one bucket serves any.
            max_context_tokens: of one sequence; at least 1.
        """
        most_blocks = -(-max_context_tokens // BLOCK_TOKENS)
        contexts, most_tokens = [], None
        if steps is not None:
            most_tokens = steps.most_tokens
            num_blocks = steps.first_tokens // BLOCK_TOKENS
            while num_blocks < most_blocks:
                contexts.append(num_blocks)
                num_blocks *= steps.growth
        contexts.append(most_blocks)
        self._buckets = [
            bucket
            for num_blocks in contexts
            for num_sequences in _NUM_SEQUENCES
            for width in sorted(widths)
            if (bucket := Bucket(num_sequences, width, num_blocks)).num_rows <= _MOST_ROWS
            and (most_tokens is None or num_sequences * num_blocks * BLOCK_TOKENS <= most_tokens)
        ]

    def largest_first(self) -> list[Bucket]:
        """In the order of recording: the first take the memory that the others find."""
        return sorted(
            self._buckets, key=lambda bucket: (bucket.num_sequences, bucket.width, bucket.num_blocks), reverse=True
        )

    def smallest_for(self, slices: Sequence[SequenceSlice]) -> Bucket | None:
        """The bucket that a step is run in; None where none holds it."""
        num_sequences = len(slices)
        width = max(len(piece.token_ids) for piece in slices)
        num_blocks = -(-max(piece.start + len(piece.token_ids) for piece in slices) // BLOCK_TOKENS)
        for bucket in self._buckets:
            if bucket.num_sequences >= num_sequences and bucket.width >= width and bucket.num_blocks >= num_blocks:
                return bucket
        return None
