"""The memory and the logits of a llama.cpp context, over a table model.

It stands for `target_service.backends.llama_context.LlamaContext`, which needs a compiled llama.cpp (`make
test-engines` has one). It refuses what llama.cpp refuses: a gap in a sequence, a batch that is too long, and tokens
beyond its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import ResourceExhausted
from target_service.backends.llama_context import BatchPart, LlamaOptions
from tests.support.table_worker import TableWorker


class TableContext:
    """Implements the methods of `LlamaContext`."""

    version = "table"

    def __init__(self, worker: TableWorker, options: LlamaOptions) -> None:
        self.options = options
        self.num_logits = worker.shape.vocabulary_size
        self.max_context_tokens = worker.shape.max_context_tokens
        self.batch_sizes: list[int] = []
        """Number of parts of each batch."""
        self.fail_on: int | None = None
        """A batch with a prompt of three tokens that ends with this token fails like a broken library."""
        self._worker = worker
        self._tokens: list[list[int]] = [[] for _ in range(options.num_sequences)]

    def decode(self, parts: Sequence[BatchPart]) -> list[NDArray[np.float32]]:
        assert sum(len(part.token_ids) for part in parts) <= self.options.batch_tokens
        longer = {part.sequence: [*self._tokens[part.sequence], *part.token_ids] for part in parts}
        if any(len(tokens) >= 3 and tokens[2] == self.fail_on for tokens in longer.values()):
            raise OSError("NULL pointer access")
        for part in parts:
            assert part.start == len(self._tokens[part.sequence]), "a gap in a sequence"
        held = [longer.get(sequence, tokens) for sequence, tokens in enumerate(self._tokens)]
        # Tokens that sequences share have one cell.
        if len({tuple(tokens[: end + 1]) for tokens in held for end in range(len(tokens))}) > self.options.num_tokens:
            raise ResourceExhausted("the KV memory of llama.cpp is full", reason="KV_EXHAUSTED")
        self._tokens = held
        self.batch_sizes.append(len(parts))
        return [self._rows(held[part.sequence], part.num_rows) for part in parts]

    def truncate(self, sequence: int, length: int) -> bool:
        del self._tokens[sequence][length:]
        return True

    def copy(self, source: int, destination: int, length: int) -> None:
        self._tokens[destination] = self._tokens[source][:length]

    def close(self) -> None:
        self._tokens.clear()

    def _rows(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        rows = [self._worker.logits_after(tokens[: len(tokens) - back]) for back in range(num_rows - 1, -1, -1)]
        return np.array(rows, dtype=np.float32).reshape(num_rows, self.num_logits)
