"""The committed tokens of one session with their chain hashes, as one growing sequence in memory.

A generation owns it and its rounds read it; the durable copy is in the session store.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.contract.types import TokenIds
from specdec.core.chain import ChainHasher


class SessionTokens:
    """Committed token ids of a session, prompt first. Positions count from the session's first token."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._ids: list[int] = []
        self._hasher = ChainHasher()
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._ids.extend(token_ids)
        self._hasher.extend(token_ids)

    def tail(self, start: int) -> TokenIds:
        """uint32 [len - start]: the tokens from position `start` on."""
        return np.array(self._ids[start:], dtype=np.uint32)

    def prefix_hash(self, length: int) -> bytes:
        """Return the chain hash (16 bytes) of the first `length` tokens."""
        return self._hasher.at(length)
