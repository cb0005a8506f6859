"""Contract of the cold tier: a store of KV block runs outside this replica, which other replicas read too.

A run is a fixed number of consecutive full blocks, counted from the session's start, and named by the published hash of
its last block. If a model is divided, each rank has a separate tier for its part of every run. `specdec.state.kv_tier`
implements the tier and decides whether fetching is faster than computing; `loop.tier_writer` offers runs,
`loop.tier_restorer` restores them, and `parallel.leader_tier` coordinates ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

#: Blocks of a run, 256 tokens. A request to the store costs as much as transferring tens of blocks, so runs are not
#: shorter; tokens beyond a session's last whole run are computed again, so they are not longer.
RUN_BLOCKS = 16

#: Most bytes of a run; runs of a large model have fewer blocks, so that neither side holds more than this at once.
MAX_RUN_BYTES = 64 << 20

Payload = NDArray[np.uint8]
"""uint8 [blocks of a run, bytes of a block]."""


def run_blocks(block_bytes: int) -> int:
    """Return the blocks of a run for a block size; it is the same on every replica of a model."""
    num_blocks = RUN_BLOCKS
    while num_blocks > 1 and num_blocks * block_bytes > MAX_RUN_BYTES:
        num_blocks //= 2
    return num_blocks


class Fetch(Protocol):
    """A fetch of consecutive runs."""

    patience_s: float
    """Time to wait for all runs, after which prefill is the better choice."""

    def copy_parts(self, run: int, first_row: int, block_ids: Sequence[int]) -> None:
        """Make other ranks copy their parts of a run into the same blocks; do nothing if there are no other ranks.

        Args:
            run: index of the run in the fetch.
            first_row: index of the first block of the run that is copied.
            block_ids: destinations of that block and those after it.
        """
        ...

    def note_copied(self, num_bytes: int, seconds: float) -> None:
        """Record that one more run is in KV blocks and how long the copy took; few runs are fetched ahead of that."""
        ...

    def stop(self, *, is_late: bool = False) -> None:
        """Stop fetching. `is_late`: whether the runs did not arrive within `patience_s`."""
        ...


class ColdTier(Protocol):
    """A store of runs. Callable from any thread; no call waits for the store."""

    run_blocks: int
    """Blocks of a run."""

    def offer(self, name: bytes, block_ids: Sequence[int], read: Callable[[], Payload | None]) -> None:
        """Store a run if it is not stored yet and there is time for it; drop it otherwise.

        Args:
            name: name of the run.
            block_ids: blocks of the run, for other ranks' parts of it.
            read: returns the run's bytes, or None if the blocks were written meanwhile; called from a thread of the
                tier.
        """
        ...

    def fetch(
        self, names: Sequence[bytes], replay_s: Sequence[float], tell: Callable[[Payload | None], None]
    ) -> Fetch | None:
        """Fetch consecutive runs, as long as they are stored and fetching is faster than computing.

        Args:
            names: names of the runs, in order.
            replay_s: seconds that computing the first 1, 2, ... runs takes.
            tell: called from a thread of the tier, once for each run in order, and with None at the end.

        Returns:
            The fetch; None if computing all of them is the better choice, and then `tell` is not called.
        """
        ...
