"""The directory of prefixes on Redis: which replicas were last seen to hold the KV of a chain of tokens.

An entry is one prefix of one tenant, under the chain hash of its tokens, with the incarnations of the replicas that
hold it: what a process held is gone with the process, and so is its name. Entries are hints. A replica evicts without
telling anybody, and an entry that is wrong costs a forward pass over tokens that was hoped to be spared, nothing else.

    specdec:TENANT:prefix:{FIRST HASH OF THE CHAIN}:HASH   sorted set: holder by the time until which it is believed

All prefixes of a chain lie in one cluster slot. Not here: which prefixes are worth an entry and what is made of the
answer (the coordinator's `replicas/prefixes`), sessions (`redis_store`, whose connections this shares). Called by the
coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec.state.connection import RedisConnection
from specdec.state.keys import prefix_keys

#: How long an entry is believed. Where replicas evict sooner it is wrong for the rest of that time.
ENTRY_TTL_S = 600.0

#: Replicas of an entry, drafts and targets together: enough to choose from. The last ones noted stay.
MAX_HOLDERS = 8

#: Of a holder's name: longer ones come from nobody of ours.
MAX_HOLDER_BYTES = 64


class RedisPrefixDirectory:
    """`PrefixDirectory` on the connections of a session store, which closes them."""

    def __init__(self, connection: RedisConnection, tenant: str, *, ttl_s: float = ENTRY_TTL_S) -> None:
        """`ttl_s`: how long an entry is believed after it was last noted, above 0."""
        self._connection = connection
        self._tenant = tenant
        self._ttl_ms = max(1, round(ttl_s * 1000))

    async def note(self, chain_hashes: Sequence[bytes], num_held: Mapping[str, int]) -> None:
        """See `PrefixDirectory.note`."""
        keys = prefix_keys(self._tenant, chain_hashes)
        args: list[str | bytes | int] = [self._ttl_ms, MAX_HOLDERS]
        for holder, count in num_held.items():
            args += [holder, count]
        await self._connection.run_script("note_prefixes", keys, args)

    async def holders(self, chain_hashes: Sequence[bytes]) -> list[list[str]]:
        """See `PrefixDirectory.holders`. What is no name of a holder is left out."""
        keys = prefix_keys(self._tenant, chain_hashes)
        answer = await self._connection.run_script("prefix_holders", keys, [MAX_HOLDERS])
        return [[name.decode() for name in names if _is_name(name)] for names in answer]


def _is_name(holder: bytes) -> bool:
    return 0 < len(holder) <= MAX_HOLDER_BYTES and holder.isascii()
