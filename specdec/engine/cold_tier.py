"""The cold tier as an engine sees it: runs of KV blocks kept beyond this replica, where others find them.

A run is a fixed number of consecutive full blocks, counted from the session's start, named by the published hash of its
last block. Where a model is divided, each rank has a tier of its own for its part of every run. Not here: where runs
are kept and whether fetching them is worth it (`specdec.state.kv_tier`), when the engine offers them
(`loop.tier_writer`) and takes them (`loop.tier_restorer`), and how ranks do so together (`parallel.leader_tier`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

#: Blocks of a run, 256 tokens: a request to the store costs as much as some tens of blocks' bytes, and what a session
#: has beyond its last whole run is computed again.
RUN_BLOCKS = 16

#: A run of a large model has fewer blocks, so that neither side ever holds more than this at once.
MAX_RUN_BYTES = 64 << 20

Payload = NDArray[np.uint8]
"""uint8 [blocks of a run, bytes of a block]."""


def run_blocks(block_bytes: int) -> int:
    """Blocks of a run where one block has so many bytes; the same on every replica of a model."""
    num_blocks = RUN_BLOCKS
    while num_blocks > 1 and num_blocks * block_bytes > MAX_RUN_BYTES:
        num_blocks //= 2
    return num_blocks


class Fetch(Protocol):
    """Runs that were asked for."""

    patience_s: float
    """For how long to wait for all of them before prefill is the better choice."""

    def copy_parts(self, run: int, first_row: int, block_ids: Sequence[int]) -> None:
        """Other ranks copy their parts of a run into the same blocks; where there are none, nothing happens.

        Args:
            run: 0 for the first that was asked for.
            first_row: of the run's blocks, the first that is copied.
            block_ids: where it and those after it go.
        """
        ...

    def note_copied(self, num_bytes: int, seconds: float) -> None:
        """One more run is in KV blocks; copying it in took so long. Few are fetched ahead of that."""
        ...

    def stop(self, *, is_late: bool = False) -> None:
        """The rest is of no use. `is_late`: because it did not come within its patience."""
        ...


class ColdTier(Protocol):
    """Callable from any thread; no call waits for the store."""

    run_blocks: int
    """Blocks of a run."""

    def offer(self, name: bytes, block_ids: Sequence[int], read: Callable[[], Payload | None]) -> None:
        """Keeps a run if it is not there yet and there is time for it, or drops it.

        Args:
            name: of the run.
            block_ids: where it is, for other ranks' parts of it.
            read: called from a thread of the tier's; None: the run is not to be had any more.
        """
        ...

    def fetch(
        self, names: Sequence[bytes], replay_s: Sequence[float], tell: Callable[[Payload | None], None]
    ) -> Fetch | None:
        """Fetches consecutive runs as far as they are there and fetching beats computing.

        Args:
            names: of the runs, in order.
            replay_s: seconds that computing the first 1, 2, ... of them takes.
            tell: called from a thread of the tier's, once a run, in order, and with None once there is no more.

        Returns:
            None where computing all of them is the better choice; `tell` is not called.
        """
        ...
