"""The share of new sessions that an operator gave to a target model, on Redis: one small record per tenant.

    specdec:TENANT:target_share   string: JSON

`coordinator.replicas.target_models` decides by it; the connections are those of `redis_store`.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from specdec.contract.errors import Internal
from specdec.settings.cluster_names import DEFAULT_CLUSTER
from specdec.state.connection import RedisConnection
from specdec.state.key_names import target_share_key
from specdec.state.store import TargetShare

#: Longest record that is read; specdec's own records are shorter.
_MAX_BYTES = 1024


class RedisTargetShares:
    """`TargetShares` on the connections of a session store, which closes them."""

    def __init__(self, connection: RedisConnection, tenant: str, *, cluster: str = DEFAULT_CLUSTER) -> None:
        self._connection = connection
        self._key = target_share_key(tenant, cluster)

    async def read(self) -> TargetShare | None:
        """See `TargetShares.read`."""
        value = await self._connection.run_command("GET", self._key)
        return _read(value) if value else None

    async def put(self, share: TargetShare | None) -> None:
        """See `TargetShares.put`."""
        if share is None:
            await self._connection.run_command("DEL", self._key)
        else:
            await self._connection.run_command("SET", self._key, json.dumps(asdict(share), sort_keys=True))


def _read(value: bytes) -> TargetShare:
    """Return the decision in a record. Raises Internal for an invalid record, which another program may have
    written."""
    try:
        fields = json.loads(value) if len(value) <= _MAX_BYTES else {}
        share = TargetShare(str(fields["fingerprint"]), float(fields["share"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Internal("the target share in the store cannot be read; promote a target model again") from error
    if not (share.fingerprint and 0.0 <= share.share <= 1.0):
        raise Internal("the target share in the store has a value out of range; promote a target model again")
    return share
