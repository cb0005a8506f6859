"""The recurrent states of one session of a hybrid: which exist, where a step begins, and which it saves.

A recurrent state cannot be cut like KV: it belongs to exactly one number of tokens. A session holds two slots, whatever
gamma is:

    verify      [ committed, not in a state | drafts ]    state after the committed tokens ─▶ the slot not read from
    next verify          [ accepted, and the new token | drafts ]    begins there: accepted tokens run again
    draft steps            one token each ─▶ the slot that does not hold the state after the committed tokens

So the state before the newest step stays, and a call that repeats or takes back tokens begins there. If neither state
fits, the session begins again at a snapshot or at its first token.

Snapshots are for other sessions and later turns: published under the same names as KV blocks, never written again, and
evicted as those are (`block_manager`, whose blocks are slots here).

`sequence` owns the states of its session. Device thread only. docs/adr/0054-recurrent-states.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from specdec.contract.types import BLOCK_TOKENS, SLOTS_PER_SESSION
from specdec.engine.sessions.block_manager import BlockManager

#: Committed tokens between two snapshots.
SNAPSHOT_TOKENS = 1024

#: A snapshot is taken before the last tokens of a prompt, because templates end it with words, such as an opened
#: thought, that are not there when the turn is rendered again. No template of the examined models writes more tokens.
_GENERATION_PROMPT_TOKENS = 16


PlannedStates: TypeAlias = tuple[int | None, tuple[tuple[int, int], ...]]
"""Fields of `specdec.engine.base.SliceStates`."""


def snapshot_lengths(start: int, end: int, prompt_len: int) -> list[int]:
    """Return the numbers of tokens in (start, end] after which snapshots are taken, all of them whole blocks.

    Args:
        start: number of tokens before a slice.
        end: number of committed tokens after it.
        prompt_len: number of tokens before the turn's output.
    """
    first = (start // SNAPSHOT_TOKENS + 1) * SNAPSHOT_TOKENS
    before_prompt_end = max(0, prompt_len - _GENERATION_PROMPT_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
    return sorted({*range(first, end + 1, SNAPSHOT_TOKENS), *[before_prompt_end] * (start < before_prompt_end <= end)})


class RecurrentStates:
    """The states of one session, by the number of tokens that they follow."""

    def __init__(self, slots: BlockManager) -> None:
        self._slots = slots
        self._own: list[int] = []
        """Slots that only this session reads and writes."""
        self._adopted: list[int] = []
        """The slot of the snapshot that the session began with; other sessions read it too."""
        self._slot_of: dict[int, int] = {}
        """The states, by the number of tokens before them."""
        self._planned: dict[int, int] = {}
        """States that the planned step saves."""
        self._snapshots: dict[bytes, list[int]] = {}
        """Snapshots that the planned step saves, by name."""

    @property
    def tables(self) -> list[list[int]]:
        """Every table of slots, for `BlockManager.check_integrity`."""
        return [self._own, self._adopted, *self._snapshots.values()]

    @property
    def num_own(self) -> int:
        """Number of slots that end with the session."""
        return len(self._own)

    @property
    def oldest(self) -> int:
        """Number of tokens before the oldest state; 0 without states."""
        return min(self._slot_of, default=0)

    def reserve(self) -> bool:
        """Take the slots of a session with a running call. Returns False, with nothing changed, if too few are left."""
        return self._slots.extend(self._own, SLOTS_PER_SESSION)

    def is_short(self, losers: Iterable[RecurrentStates | None] = ()) -> bool:
        """Return whether slots are missing even if the losers give back theirs."""
        num_missing = SLOTS_PER_SESSION - len(self._own) - self._slots.num_available
        return num_missing > 0 and num_missing > self._slots.num_given_back(all_tables(losers))

    @property
    def need(self) -> str:
        """Words for the slots that a session needs beside its KV."""
        return f"{SLOTS_PER_SESSION} of {self._slots.block_bytes} bytes each beside its KV"

    def rewind(self, length: int) -> int:
        """Forget the states after more than `length` tokens; return the number of tokens before the newest one left."""
        self._slot_of = {at: slot for at, slot in self._slot_of.items() if at <= length}
        return max(self._slot_of, default=0)

    def keep_newest(self) -> None:
        """Give back the slots without the newest state: no call of the session runs."""
        newest = self._slot_of.get(max(self._slot_of, default=0))
        self._slot_of = {at: slot for at, slot in self._slot_of.items() if slot == newest}
        if newest not in self._adopted:
            self._slots.free(self._adopted)
        self._own.sort(key=lambda slot: slot != newest)
        self._slots.shorten(self._own, int(newest in self._own))

    def drop_snapshots(self) -> None:
        """Give back the slots of the snapshots that slices have taken; published ones stay for other sessions."""
        for table in self._snapshots.values():
            self._slots.free(table)
        self._snapshots = {}

    def withdraw(self) -> int:
        """Let no other session begin at the snapshot that this one began with; return the number of snapshots."""
        for slot in self._adopted:
            self._slots.withdraw(slot)
        return len(self._adopted)

    def release(self) -> None:
        """Forget every state and give back all slots."""
        self._slot_of, self._planned = {}, {}
        for table in (self._own, self._adopted):
            self._slots.free(table)
        self.drop_snapshots()

    def has_snapshot(self, name: bytes) -> bool:
        """Return whether a snapshot is published under this name."""
        return self._slots.is_published(name)

    def adopt(self, length: int, name: bytes) -> None:
        """Begin at the snapshot of this name, after `length` tokens; all other states are forgotten."""
        self._slots.free(self._adopted)
        self._slots.adopt(self._adopted, [name])
        self._slot_of = {length: self._adopted[0]}

    def plan(
        self, start: int, end: int, committed: int, *, goes_on: bool, snapshots: Mapping[int, bytes]
    ) -> PlannedStates:
        """Return the states of a slice of tokens [start, end); `note_run` follows, or `release`.

        Args:
            start: 0, or the length of a state.
            end: number of tokens after the slice.
            committed: number of leading tokens that the session will not take back.
            goes_on: whether tokens after `end` will run without going back to the committed ones.
            snapshots: names of the snapshots to take, by number of tokens; all in (start, end].
        """
        source = self._slot_of[start] if start else None
        self._planned = {}
        if start < committed:
            after = min(end, committed)
            self._planned[after] = self._spare(source)
            if after < end and goes_on:
                self._planned[end] = self._spare(self._planned[after])
        elif goes_on:
            # The state after the committed tokens stays.
            is_after_drafts = start > committed and source in self._own
            self._planned[end] = source if is_after_drafts and source is not None else self._spare(source)
        saves = [(at - start, slot) for at, slot in self._planned.items()]
        for at, name in snapshots.items():
            table: list[int] = []
            is_taken = name in self._snapshots or self._slots.is_published(name)
            if not is_taken and self._slots.extend(table, 1):
                self._snapshots[name] = table
                saves.append((at - start, table[0]))
        return source, tuple(sorted(saves))

    def note_run(self) -> None:
        """Note that the planned slice has run."""
        written = set(self._planned.values())
        kept = {at: slot for at, slot in self._slot_of.items() if slot not in written} | self._planned
        # A snapshot that the session began with is let go once two states follow it: blocks after it are published.
        self._slot_of = dict(sorted(kept.items())[-SLOTS_PER_SESSION:])
        if self._adopted and self._adopted[0] not in self._slot_of.values():
            self._slots.free(self._adopted)
        self._planned = {}

    def publish(self) -> None:
        """Publish the snapshots of the slice that has run."""
        for name, table in self._snapshots.items():
            self._slots.publish(table[0], name)
        self.drop_snapshots()

    def _spare(self, other: int | None) -> int:
        """Return the own slot that is not `other`."""
        return next(slot for slot in self._own if slot != other)


def all_tables(states: Iterable[RecurrentStates | None]) -> list[list[int]]:
    """Return every table of slots of some sessions."""
    return [table for each in states if each is not None for table in each.tables]
