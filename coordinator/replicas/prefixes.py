"""The directory of prefixes as a coordinator uses it: read when a session begins, written behind its turns.

A prompt's prefixes are looked up, and told of, at growing depths: 4 blocks (64 tokens), 8, 16 and so on, and the last
full block. That finds, of a prefix that sessions share, at least half; which replica holds it is what matters, for that
one finds the whole by itself. Below four blocks nothing is worth a look.

Nothing waits for it: what is not answered in time is not known, what cannot be written is dropped, and placement is
then what it is without. The answer goes, with a session's beginning, to `placement`. Not here: what is made of the
answer (`prefix_rule`, `placement`), the entries themselves (`specdec.state.prefix_directory`). Called by
`generation/turn_preparer` and `generation/generation`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from specdec.errors import SpecdecError
from specdec.state.store import PrefixDirectory
from specdec.types import BLOCK_TOKENS

#: Shortest prefix that is looked at, in blocks; every chain begins with it.
LEAST_BLOCKS = 4

#: How long the beginning of a turn may wait for an answer. It is asked for together with the session's lease, so that
#: there is something to wait for only where the store answers that and what follows, and this not.
LOOK_UP_TIMEOUT_S = 0.1

#: Notes under way at most; one more is dropped.
MAX_NOTES = 64

_log = logging.getLogger(__name__)


def prefix_lengths(num_tokens: int) -> list[int]:
    """Lengths, in tokens, of the prefixes that are looked at of so many tokens: rising, block by block."""
    num_blocks = num_tokens // BLOCK_TOKENS
    depths = []
    depth = LEAST_BLOCKS
    while depth < num_blocks:
        depths.append(depth)
        depth *= 2
    if num_blocks >= LEAST_BLOCKS:
        depths.append(num_blocks)
    return [depth * BLOCK_TOKENS for depth in depths]


class Prefixes:
    """The directory, or none. Used from one event loop."""

    def __init__(self, directory: PrefixDirectory | None) -> None:
        self._directory = directory
        self._notes: set[asyncio.Task[None]] = set()
        self._look_ups: set[asyncio.Task[dict[str, int]]] = set()
        self._is_answered = True

    def look_up(self, num_tokens: int, hash_at: Callable[[int], bytes]) -> asyncio.Task[dict[str, int]]:
        """Begins to ask how much of a session's tokens replicas hold; `answer` has what came of it.

        Args:
            num_tokens: of the session.
            hash_at: their chain hash at a length.
        """
        looking_up = asyncio.create_task(self._ask(num_tokens, hash_at))
        self._look_ups.add(looking_up)
        looking_up.add_done_callback(self._look_ups.discard)
        return looking_up

    async def answer(self, looking_up: asyncio.Task[dict[str, int]]) -> dict[str, int]:
        """Leading tokens by a replica's incarnation; nothing where nobody says so in time."""
        await asyncio.wait([looking_up], timeout=LOOK_UP_TIMEOUT_S)
        if looking_up.done():
            return {} if looking_up.cancelled() else looking_up.result()
        looking_up.cancel()
        self._tell_once("no answer in time")
        return {}

    def note(self, hash_at: Callable[[int], bytes], num_held: Mapping[str, int]) -> None:
        """Begins to write down how many leading tokens of a session replicas hold; nobody waits for it.

        Args:
            hash_at: chain hash of the session's tokens at a length.
            num_held: tokens by a replica's incarnation.
        """
        lengths = prefix_lengths(max(num_held.values(), default=0))
        if self._directory is None or not lengths or len(self._notes) >= MAX_NOTES:
            return
        counts = {
            holder: count
            for holder, num_tokens in num_held.items()
            if (count := sum(length <= num_tokens for length in lengths))
        }
        writing = asyncio.create_task(self._write(self._directory, [hash_at(length) for length in lengths], counts))
        self._notes.add(writing)
        writing.add_done_callback(self._notes.discard)

    async def close(self) -> None:
        """Gives up what is under way. Idempotent."""
        under_way = [*self._notes, *self._look_ups]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _ask(self, num_tokens: int, hash_at: Callable[[int], bytes]) -> dict[str, int]:
        lengths = prefix_lengths(num_tokens)
        if self._directory is None or not lengths:
            return {}
        try:
            holders = await self._directory.holders([hash_at(length) for length in lengths])
        except SpecdecError as error:
            self._tell_once(error.message)
            return {}
        self._is_answered = True
        return {holder: length for length, names in zip(lengths, holders, strict=True) for holder in names}

    async def _write(self, directory: PrefixDirectory, chain_hashes: list[bytes], counts: dict[str, int]) -> None:
        try:
            await directory.note(chain_hashes, counts)
        except SpecdecError as error:
            self._tell_once(error.message)

    def _tell_once(self, reason: str) -> None:
        """Logs the first failure after an answer."""
        if self._is_answered:
            self._is_answered = False
            _log.warning("the directory of prefixes cannot be used: %s", reason)
