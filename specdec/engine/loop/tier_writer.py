"""Offer every run of KV blocks to the cold tier once its last block is published.

The device thread only names the blocks of a run; the tier's own thread copies their bytes while steps run. No pins are
needed: a published block is not written again before it is evicted, so a copy is valid if the stamps of its blocks are
unchanged afterwards (`BlockManager.stamps`), and is dropped otherwise.

Called by `steps` and `call_desk` in place of the session table's own `publish`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import partial

from specdec.engine.base import Worker
from specdec.engine.cold_tier import ColdTier, Payload
from specdec.engine.sessions.sequence import Sequence
from specdec.engine.sessions.table import SessionTable


class TierWriter:
    """Writer of one worker's blocks to one tier."""

    def __init__(self, tier: ColdTier, worker: Worker, sessions: SessionTable) -> None:
        self._tier = tier
        self._worker = worker
        self._sessions = sessions

    def publish(self, sequence: Sequence, committed_len: int) -> None:
        """Publish blocks as `SessionTable.publish` does, and offer the runs that are complete. Device thread only."""
        num_blocks = self._tier.run_blocks
        num_before = sequence.num_published // num_blocks
        self._sessions.publish(sequence, committed_len)
        for run in range(num_before, sequence.num_published // num_blocks):
            names = sequence.block_names(run * num_blocks, (run + 1) * num_blocks)
            block_ids = sequence.block_table[run * num_blocks : (run + 1) * num_blocks]
            self._tier.offer(names[-1], block_ids, partial(self._read, names))

    def _read(self, names: Many[bytes]) -> Payload | None:
        """Return the blocks published under these names, or None if one is not published. Any thread may call this."""
        blocks = self._sessions.blocks
        stamps = blocks.stamps(names)
        if stamps is None:
            return None
        rows = self._worker.read_blocks([block_id for block_id, _ in stamps])
        return rows if blocks.stamps(names) == stamps else None
