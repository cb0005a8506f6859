"""The coordinator's use of the prefix directory: it is read when a turn begins, and written in the background.

A prompt's prefixes are looked up and noted at growing lengths: 4 blocks (64 tokens), 8, 16 and so on, and the last full
block. So at least half of a shared prefix is found, which is enough to name the replica; that one finds the whole
prefix in its own cache. Prefixes below four blocks are not worth a lookup.

KV that a target computed with an adapter fits that adapter alone, so its prefixes are noted under salted hashes.

No request waits long for the directory. An answer that is late counts as unknown, a note that cannot be written is
dropped, and placement then works as without a directory. `generation/turn_preparer` looks prefixes up and hands the
answer to `placement`; `generation/generation` notes them; `specdec.state.prefix_directory` holds the entries.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping

from specdec.contract.errors import SpecdecError
from specdec.contract.types import BLOCK_TOKENS
from specdec.state.store import PrefixDirectory

#: Length of the shortest prefix, in blocks. Every chain begins with it.
LEAST_BLOCKS = 4

#: Longest time that the beginning of a turn waits for an answer. The lookup is sent together with the request for the
#: session's lease, so a wait remains only if the store has answered the lease and all that follows, and not this.
LOOK_UP_TIMEOUT_S = 0.1

#: Largest number of notes under way; one more is dropped.
MAX_NOTES = 64

_log = logging.getLogger(__name__)


def prefix_lengths(num_tokens: int) -> list[int]:
    """Return the lengths, in tokens, of the prefixes of `num_tokens` tokens that are noted, in rising order."""
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
    """Uses the directory, or does nothing if there is none. Used from one event loop."""

    def __init__(self, directory: PrefixDirectory | None) -> None:
        self._directory = directory
        self._notes: set[asyncio.Task[None]] = set()
        self._look_ups: set[asyncio.Task[dict[str, int]]] = set()
        self._is_answered = True

    def look_up(
        self, tenant: str, num_tokens: int, hash_at: Callable[[int], bytes], adapter: str = ""
    ) -> asyncio.Task[dict[str, int]]:
        """Start the lookup of how many of a session's tokens each replica holds; `answer` returns its result.

        Args:
            tenant: tenant that owns the session.
            num_tokens: number of tokens of the session.
            hash_at: returns the chain hash of the tokens at a length.
            adapter: fingerprint of the session's model with an adapter; "" for a base model.
        """
        looking_up = asyncio.create_task(self._ask(tenant, num_tokens, _of_adapter(hash_at, adapter)))
        self._look_ups.add(looking_up)
        looking_up.add_done_callback(self._look_ups.discard)
        return looking_up

    async def answer(self, looking_up: asyncio.Task[dict[str, int]]) -> dict[str, int]:
        """Return the number of leading tokens by incarnation; empty if no answer came in time."""
        await asyncio.wait([looking_up], timeout=LOOK_UP_TIMEOUT_S)
        if looking_up.done():
            return {} if looking_up.cancelled() else looking_up.result()
        looking_up.cancel()
        self._warn_once(f"no answer within {LOOK_UP_TIMEOUT_S:g} s")
        return {}

    def note(
        self, tenant: str, hash_at: Callable[[int], bytes], num_held: Mapping[str, int], adapter: str = ""
    ) -> None:
        """Start to note in the background how many leading tokens of a session each replica holds.

        Args:
            tenant: tenant that owns the session.
            hash_at: returns the chain hash of the session's tokens at a length.
            num_held: number of tokens by incarnation.
            adapter: as for `look_up`.
        """
        hash_at = _of_adapter(hash_at, adapter)
        lengths = prefix_lengths(max(num_held.values(), default=0))
        if self._directory is None or not lengths or len(self._notes) >= MAX_NOTES:
            return
        counts = {
            holder: count
            for holder, num_tokens in num_held.items()
            if (count := sum(length <= num_tokens for length in lengths))
        }
        chain_hashes = [hash_at(length) for length in lengths]
        writing = asyncio.create_task(self._write(self._directory.of_tenant(tenant), chain_hashes, counts))
        self._notes.add(writing)
        writing.add_done_callback(self._notes.discard)

    async def close(self) -> None:
        """Cancel lookups and notes under way. Idempotent."""
        under_way = [*self._notes, *self._look_ups]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _ask(self, tenant: str, num_tokens: int, hash_at: Callable[[int], bytes]) -> dict[str, int]:
        lengths = prefix_lengths(num_tokens)
        if self._directory is None or not lengths:
            return {}
        try:
            holders = await self._directory.of_tenant(tenant).holders([hash_at(length) for length in lengths])
        except SpecdecError as error:
            self._warn_once(error.message)
            return {}
        self._is_answered = True
        return {holder: length for length, names in zip(lengths, holders, strict=True) for holder in names}

    async def _write(self, directory: PrefixDirectory, chain_hashes: list[bytes], counts: dict[str, int]) -> None:
        try:
            await directory.note(chain_hashes, counts)
        except SpecdecError as error:
            self._warn_once(error.message)

    def _warn_once(self, reason: str) -> None:
        """Log the first failure after an answer."""
        if self._is_answered:
            self._is_answered = False
            _log.warning("prefix directory unavailable: %s", reason)


def _of_adapter(hash_at: Callable[[int], bytes], adapter: str) -> Callable[[int], bytes]:
    """Return the hashes under which prefixes of an adapter are noted; a base model has the tokens' hashes."""
    if not adapter:
        return hash_at

    def salted(length: int) -> bytes:
        chain_hash = hash_at(length)
        return hashlib.blake2b(chain_hash, digest_size=len(chain_hash), key=adapter.encode()[:64]).digest()

    return salted
