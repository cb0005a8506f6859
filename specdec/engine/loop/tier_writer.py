"""Offers every run of blocks to the cold tier once its last block is published.

The device thread only says which blocks a run has; the tier's own thread copies their bytes out, while steps run. That
needs no pins: a published block is not written again before it is evicted, so what was read is right if every block is
afterwards where it was (`BlockManager.stamps`), and void otherwise.

Not here: the tier, restoring (`restores`). Called by `steps` and `device_loop` in place of the session table's own
`publish`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import partial

from specdec.engine.base import Worker
from specdec.engine.cold_tier import ColdTier, Payload
from specdec.engine.sessions.sequence import Sequence
from specdec.engine.sessions.table import SessionTable


class TierWriter:
    """Of one worker's blocks to one tier."""

    def __init__(self, tier: ColdTier, worker: Worker, sessions: SessionTable) -> None:
        self._tier = tier
        self._worker = worker
        self._sessions = sessions

    def publish(self, sequence: Sequence, committed_len: int) -> None:
        """As `SessionTable.publish`, and offers the runs that are whole now. Device thread only."""
        num_blocks = self._tier.run_blocks
        num_before = sequence.num_published // num_blocks
        self._sessions.publish(sequence, committed_len)
        for run in range(num_before, sequence.num_published // num_blocks):
            names = sequence.block_names(run * num_blocks, (run + 1) * num_blocks)
            block_ids = sequence.block_table[run * num_blocks : (run + 1) * num_blocks]
            self._tier.offer(names[-1], block_ids, partial(self._read, names))

    def _read(self, names: Many[bytes]) -> Payload | None:
        """The blocks that are published under these names; None where one is not, or not any more. From any thread."""
        blocks = self._sessions.blocks
        stamps = blocks.stamps(names)
        if stamps is None:
            return None
        rows = self._worker.read_blocks([block_id for block_id, _ in stamps])
        return rows if blocks.stamps(names) == stamps else None
