"""A check of the session table, for tests: blocks are owned as counted, and lengths are consistent."""

from __future__ import annotations

from collections.abc import Collection

from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.sessions.block_manager import BlockManager, blocks_for
from specdec.engine.sessions.sequence import Sequence


def check_integrity(blocks: BlockManager, sequences: Collection[Sequence]) -> None:
    """Check the sequences of all sessions.

    Raises:
        RuntimeError: a block has more or fewer owners than counted, or a session's lengths contradict each other.
    """
    forks = [fork for sequence in sequences for fork in sequence.forks]
    blocks.check_integrity([owner.block_table for owner in (*sequences, *forks)])
    for fork in forks:
        if fork.root is None or not fork.kv_len <= min(len(fork), len(fork.block_table) * BLOCK_TOKENS):
            raise RuntimeError(f"a fork of session {fork.session_id} has outlived its root or its room")
    for sequence in sequences:
        published = sequence.num_published * BLOCK_TOKENS
        capacity = len(sequence.block_table) * BLOCK_TOKENS
        if not published <= sequence.kv_len <= min(len(sequence), capacity):
            raise RuntimeError(
                f"session {sequence.session_id}: {published} published, {sequence.kv_len} with KV, "
                f"{len(sequence)} tokens, room for {capacity}"
            )
        most = max(sequence.kv_len, sequence.reserved_len)
        if not sequence.in_flight and (sequence.num_pending or len(sequence.block_table) > blocks_for(most)):
            raise RuntimeError(f"idle session {sequence.session_id} holds more than its KV and its turn need")
