"""The directory of prefixes on Redis: which replicas were last seen to hold the KV of a chain of tokens.

An entry is one prefix of one tenant. Its key is the chain hash of the tokens; its members are the incarnations of the
replicas that hold the prefix, because a process's KV ends with the process. Entries are hints: a replica evicts without
notice, and a wrong entry costs one forward pass over the tokens.

    specdec:TENANT:prefix:{FIRST HASH OF THE CHAIN}:HASH   sorted set: holder by the time at which the entry expires

All prefixes of a chain lie in one slot of a Redis Cluster. The coordinator's `replicas/prefixes` decides which prefixes
get an entry. The connections are those of `redis_store`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec.settings.cluster_names import DEFAULT_CLUSTER
from specdec.state.connection import RedisConnection
from specdec.state.key_names import prefix_keys

#: Time after which an entry expires. If a replica evicts sooner, the entry is wrong until then.
ENTRY_TTL_S = 600.0

#: Limit of replicas in an entry, drafts and targets together, which is enough for a choice. The latest stay.
MAX_HOLDERS = 8

#: Longest name of a holder; the names of specdec's replicas are shorter.
MAX_HOLDER_BYTES = 64


class RedisPrefixDirectory:
    """`PrefixDirectory` on the connections of a session store, which closes them."""

    def __init__(
        self,
        connection: RedisConnection,
        tenant: str,
        *,
        cluster: str = DEFAULT_CLUSTER,
        ttl_s: float = ENTRY_TTL_S,
    ) -> None:
        """`ttl_s`: time after the last note at which an entry expires, above 0."""
        self._connection = connection
        self._tenant = tenant
        self._cluster = cluster
        self._ttl_ms = max(1, round(ttl_s * 1000))

    def of_tenant(self, tenant: str) -> RedisPrefixDirectory:
        """See `PrefixDirectory.of_tenant`."""
        return RedisPrefixDirectory(self._connection, tenant, cluster=self._cluster, ttl_s=self._ttl_ms / 1000)

    async def note(self, chain_hashes: Sequence[bytes], num_held: Mapping[str, int]) -> None:
        """See `PrefixDirectory.note`."""
        keys = prefix_keys(self._tenant, chain_hashes, self._cluster)
        args: list[str | bytes | int] = [self._ttl_ms, MAX_HOLDERS]
        for holder, count in num_held.items():
            args += [holder, count]
        await self._connection.run_script("note_prefixes", keys, args)

    async def holders(self, chain_hashes: Sequence[bytes]) -> list[list[str]]:
        """See `PrefixDirectory.holders`. Members that are not valid names are skipped."""
        keys = prefix_keys(self._tenant, chain_hashes, self._cluster)
        answer = await self._connection.run_script("prefix_holders", keys, [MAX_HOLDERS])
        return [[name.decode() for name in names if _is_name(name)] for names in answer]


def _is_name(holder: bytes) -> bool:
    return 0 < len(holder) <= MAX_HOLDER_BYTES and holder.isascii()
