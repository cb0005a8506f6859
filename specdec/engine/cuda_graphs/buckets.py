"""The step sizes that are recorded as CUDA graphs, and the choice of one of them for a step.

A bucket is a rectangle: a number of sequences, a number of rows per sequence, and a maximum context in KV blocks. Sizes
grow geometrically, so a few dozen buckets serve every small step. Called by `engine.cuda_graphs.graph_steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice

_NUM_SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
#: Maximum number of sequences of a recorded step.
MOST_SEQUENCES = _NUM_SEQUENCES[-1]
# In larger steps the GPU's work outweighs the launch time that a graph saves. The logits of this many rows stay
# allocated: 250 MiB for 128,000 tokens in float32.
_MOST_ROWS = 512


@dataclass(frozen=True, slots=True)
class Bucket:
    """The size of a recorded step."""

    num_sequences: int
    width: int
    """Number of rows of each sequence."""
    num_blocks: int
    """Maximum number of KV blocks of each sequence."""

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.width


@dataclass(frozen=True, slots=True)
class ContextSteps:
    """Context sizes that get separate buckets, for an attention whose cost grows with the bucket's context."""

    first_tokens: int
    """Smallest context."""
    growth: int
    """Factor between one context size and the next."""
    most_tokens: int
    """Maximum number of context tokens of a bucket, over all its sequences."""


class Buckets:
    """All buckets of one kind of step."""

    def __init__(self, widths: Iterable[int], steps: ContextSteps | None, max_context_tokens: int) -> None:
        """
        Args:
            widths: rows per sequence, such as 1 for a draft step and gamma + 1 for a verification.
            steps: context sizes; None: one bucket serves every context.
            max_context_tokens: maximum context of one sequence; at least 1.
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
        """Return the buckets in the order of recording: smaller ones reuse the memory of the larger ones."""
        return sorted(
            self._buckets, key=lambda bucket: (bucket.num_sequences, bucket.width, bucket.num_blocks), reverse=True
        )

    def smallest_for(self, slices: Sequence[SequenceSlice]) -> Bucket | None:
        """Return the smallest bucket that holds a step, or None if no bucket does."""
        num_sequences = len(slices)
        width = max(len(piece.token_ids) for piece in slices)
        num_blocks = -(-max(piece.start + len(piece.token_ids) for piece in slices) // BLOCK_TOKENS)
        for bucket in self._buckets:
            if bucket.num_sequences >= num_sequences and bucket.width >= width and bucket.num_blocks >= num_blocks:
                return bucket
        return None
