"""Decisions of operators on Redis that all coordinators of a tenant share: one small record each.

    specdec:TENANT:promotion      string: JSON; the promotion of a draft pool (`coordinator.routing.promotion`)
    specdec:TENANT:target_share   string: JSON; a target model's share of new sessions
                                  (`coordinator.replicas.target_models`)

The records outlive the coordinators. The connections are those of `redis_store`.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from specdec.contract.errors import Internal
from specdec.settings.cluster_names import DEFAULT_CLUSTER
from specdec.settings.pool_names import is_pool_name
from specdec.state.connection import RedisConnection
from specdec.state.key_names import promotion_key, target_share_key
from specdec.state.store import PromotionRecord, PromotionStatus, TargetShare


class RedisTargetShares:
    """`TargetShares` on the connections of a session store, which closes them."""

    def __init__(self, connection: RedisConnection, tenant: str, *, cluster: str = DEFAULT_CLUSTER) -> None:
        self._connection = connection
        self._key = target_share_key(tenant, cluster)

    async def read(self) -> TargetShare | None:
        """See `TargetShares.read`."""
        value = await self._connection.run_command("GET", self._key)
        return _read_share(value) if value else None

    async def put(self, share: TargetShare | None) -> None:
        """See `TargetShares.put`."""
        if share is None:
            await self._connection.run_command("DEL", self._key)
        else:
            await self._connection.run_command("SET", self._key, json.dumps(asdict(share), sort_keys=True))


def _read_share(value: bytes) -> TargetShare:
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


_ANY, _NONE = "*", ""

#: Longest record that is read; specdec's own records are shorter for every pool name.
_MAX_BYTES = 1024


class RedisPromotions:
    """`Promotions` on the connections of a session store, which closes them."""

    def __init__(self, connection: RedisConnection, tenant: str, *, cluster: str = DEFAULT_CLUSTER) -> None:
        self._connection = connection
        self._key = promotion_key(tenant, cluster)

    async def read(self) -> PromotionRecord | None:
        """See `Promotions.read`."""
        return _read(await self._connection.run_command("GET", self._key))

    async def put(self, promotion: PromotionRecord | None) -> PromotionRecord | None:
        """See `Promotions.put`."""
        return await self._swap(_ANY, promotion)

    async def swap(self, expected: PromotionRecord, wanted: PromotionRecord) -> PromotionRecord | None:
        """See `Promotions.swap`."""
        return await self._swap(_write(expected), wanted)

    async def _swap(self, expected: str, wanted: PromotionRecord | None) -> PromotionRecord | None:
        return _read(await self._connection.run_script("swap_promotion", [self._key], [expected, _write(wanted)]))


def _write(promotion: PromotionRecord | None) -> str:
    return _NONE if promotion is None else json.dumps(asdict(promotion), sort_keys=True)


def _read(value: bytes | None) -> PromotionRecord | None:
    """Return the promotion in a record. Raises Internal for an invalid record, which another program may have
    written."""
    if not value:
        return None
    try:
        fields = json.loads(value) if len(value) <= _MAX_BYTES else {}
        if not isinstance(fields["pool"], str):
            raise TypeError("the pool's name is not text")
        promotion = PromotionRecord(
            fields["pool"], float(fields["share"]), float(fields["most"]), PromotionStatus(fields["status"])
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Internal("the promotion record in the store cannot be read; promote a draft pool again") from error
    if not (is_pool_name(promotion.pool) and 0.0 < promotion.share <= promotion.most <= 1.0):
        raise Internal("the promotion record in the store has a value out of range; promote a draft pool again")
    return promotion
