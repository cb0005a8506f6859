"""Whose KV blocks a call may take: idle sessions first, then younger turns (docs/adr/0039-kv-reservations.md).

A call that states the greatest length of its session gets blocks for that length, which stay in the session's table
until the turn ends. So a turn that was admitted never waits for blocks, and the sum of all reservations never exceeds
the pool. KV of idle sessions, which have no running turn, is a cache: it does not count, and any call may take it.

Calls that state no length (of older coordinators, or beyond `--kv-reserve-tokens`) take blocks as they grow. Where
those run out, a call takes them from turns without a reservation, or beyond it, that began after its own: from waiting
calls first, then from turns between two calls, the youngest first. Such a turn loses no token: it runs its tokens again
when its place has come. A waiting call that needs more than is reserved for its turn is beyond its reservation, also
if its turn holds no other blocks.
The oldest turn always goes on, and no two turns take blocks from each other in turn.

`table` calls this on the device thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from specdec.contract.errors import ResourceExhausted
from specdec.engine.sessions.block_manager import BlockManager, blocks_for
from specdec.engine.sessions.sequence import Sequence


def is_idle(sequence: Sequence, now_s: float) -> bool:
    """Return whether a session has no running turn: any call may take its blocks."""
    return _is_between_calls(sequence, now_s) and sequence.held_until_s <= now_s


def is_within_reservation(sequence: Sequence) -> bool:
    """Return whether a turn holds the blocks that are reserved for it, and no others."""
    return bool(sequence.reserved_len) and len(sequence.block_table) == blocks_for(sequence.reserved_len)


def shortage(sequence: Sequence, num_tokens: int) -> tuple[str, str]:
    """Return what a waiting call of `num_tokens` tokens lacks, and how much of it the call needs: words of messages."""
    if sequence.states is not None and sequence.states.is_short():
        return "recurrent states", sequence.states.need
    return "KV blocks", str(blocks_for(num_tokens) - len(sequence.block_table))


def require_pool(num_tokens: int, blocks: BlockManager, states: BlockManager | None = None) -> None:
    """Raise ResourceExhausted (KV_EXHAUSTED, never to be retried) if the whole pool is too small for some tokens.

    `states` are the slots of a hybrid, which take a part of the pool.
    """
    num_blocks = blocks_for(num_tokens)
    if num_blocks > blocks.num_blocks:
        beside = "" if states is None else f" beside {states.num_blocks * states.block_bytes} bytes of recurrent states"
        error = ResourceExhausted(
            f"{num_tokens} tokens need {num_blocks} KV blocks, this replica has {blocks.num_blocks}{beside}",
            reason="KV_EXHAUSTED",
        )
        error.retry_after_s = None
        raise error


def next_release_s(sequences: Iterable[Sequence], now_s: float) -> float | None:
    """Return the time at which the first pin or hold on blocks ends; None without any."""
    return min(
        (
            end_s
            for sequence in sequences
            if sequence.block_table and not sequence.in_flight
            for end_s in (sequence.pinned_until_s, sequence.held_until_s)
            if end_s > now_s
        ),
        default=None,
    )


class Takeover:
    """One attempt to find blocks for a call, if the free ones are too few and no fork has any."""

    def __init__(self, blocks: BlockManager, sequences: Collection[Sequence], now_s: float) -> None:
        """`sequences` are those of all sessions, least recently used first."""
        self._blocks = blocks
        self._sequences = sequences
        self._now_s = now_s

    def run(
        self, sequence: Sequence, needed_len: int, least_len: int | None, preemptable: Iterable[Sequence]
    ) -> int | None:
        """Extend the table of `sequence` to `needed_len` tokens, or if idle sessions have too few blocks for that
        and younger turns must lose theirs, to `least_len`.

        Args:
            sequence: sequence of the call.
            needed_len: number of tokens with those that are reserved.
            least_len: number of tokens without which the call cannot run; None if it needs all, and may not take blocks
                from turns that run.
            preemptable: sequences of waiting calls that may lose all their blocks, in this order.

        Returns:
            The number of turns that lost blocks; None if the call must wait.
        """
        if sequence.grow(needed_len, self._blocks):
            return 0
        idle = [other for other in self._sequences if is_idle(other, self._now_s)]
        if self._take(sequence, needed_len, idle) is not None:
            return 0
        waiting = list(preemptable)
        if least_len is None:
            return self._take(sequence, needed_len, [*idle, *waiting], num_idle=len(idle))
        if sequence.grow(least_len, self._blocks):
            return 0
        losers = [*idle, *waiting, *self._younger_turns(sequence)]
        return self._take(sequence, least_len, losers, num_idle=len(idle))

    def _younger_turns(self, sequence: Sequence) -> list[Sequence]:
        """Return the turns between two calls that began after the sequence's own, the youngest first.

        Turns within their reservation are left out.
        """
        younger = [
            other
            for other in self._sequences
            if other.turn_order > sequence.turn_order
            and not is_within_reservation(other)
            and _is_between_calls(other, self._now_s)
            and not is_idle(other, self._now_s)
        ]
        return sorted(younger, key=lambda other: -other.turn_order)

    def _take(self, sequence: Sequence, num_tokens: int, losers: list[Sequence], *, num_idle: int = 0) -> int | None:
        """Take the blocks of one loser after the other until the table covers `num_tokens`.

        Returns:
            The number of losers with blocks after the first `num_idle`; None if all together have too few.
        """
        num_missing = blocks_for(num_tokens) - len(sequence.block_table) - self._blocks.num_available
        if sum(len(other.block_table) for other in losers) < num_missing:
            return None
        if sequence.states is not None and sequence.states.is_short(other.states for other in losers):
            return None
        num_preempted = 0
        for index, other in enumerate(losers):
            if sequence.grow(num_tokens, self._blocks):
                return num_preempted
            num_preempted += bool(other.block_table) and index >= num_idle
            if other.in_flight:
                other.drop_kv(self._blocks)
            else:
                other.forget(self._blocks)
        return num_preempted if sequence.grow(num_tokens, self._blocks) else None


def _is_between_calls(sequence: Sequence, now_s: float) -> bool:
    return not sequence.in_flight and sequence.pinned_until_s <= now_s
