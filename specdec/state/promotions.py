"""The promotion of a draft pool on Redis: one small record a tenant, shared by its coordinators and kept beyond them.

    specdec:TENANT:promotion   string: JSON

Not here: what is decided (the coordinator's `routing/promotion`), sessions (`redis_store`, whose connections this
shares). Called by the coordinator.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from specdec.errors import Internal
from specdec.settings.pool_names import is_pool_name
from specdec.state.connection import RedisConnection
from specdec.state.keys import promotion_key
from specdec.state.store import Promotion, PromotionStatus

_ANY, _NONE = "*", ""

#: Of a record; ours have less, whatever characters their pool's name is of.
_MAX_BYTES = 1024


class RedisPromotions:
    """`Promotions` on the connections of a session store, which closes them."""

    def __init__(self, connection: RedisConnection, tenant: str) -> None:
        self._connection = connection
        self._key = promotion_key(tenant)

    async def read(self) -> Promotion | None:
        """See `Promotions.read`."""
        return _read(await self._connection.run_command("GET", self._key))

    async def put(self, promotion: Promotion | None) -> Promotion | None:
        """See `Promotions.put`."""
        return await self._swap(_ANY, promotion)

    async def swap(self, expected: Promotion, wanted: Promotion) -> Promotion | None:
        """See `Promotions.swap`."""
        return await self._swap(_write(expected), wanted)

    async def _swap(self, expected: str, wanted: Promotion | None) -> Promotion | None:
        return _read(await self._connection.run_script("swap_promotion", [self._key], [expected, _write(wanted)]))


def _write(promotion: Promotion | None) -> str:
    return _NONE if promotion is None else json.dumps(asdict(promotion), sort_keys=True)


def _read(value: bytes | None) -> Promotion | None:
    """Raises Internal for what is no record of ours: the store is shared with others."""
    if not value:
        return None
    try:
        fields = json.loads(value) if len(value) <= _MAX_BYTES else {}
        if not isinstance(fields["pool"], str):
            raise TypeError("a pool's name is text")
        promotion = Promotion(
            fields["pool"], float(fields["share"]), float(fields["most"]), PromotionStatus(fields["status"])
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Internal("the store's promotion of a draft pool cannot be read; promote one anew") from error
    if not (is_pool_name(promotion.pool) and 0.0 < promotion.share <= promotion.most <= 1.0):
        raise Internal("the store's promotion of a draft pool is out of its range; promote one anew")
    return promotion
