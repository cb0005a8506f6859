"""Measurement of a cold tier from outside, by a test value, for `specdec doctor`.

A replica measures its tier by itself (`kv_reader`).
"""

from __future__ import annotations

import time
from typing import Any

from redis.exceptions import RedisError

from specdec.contract.errors import Unavailable
from specdec.core.restore_rule import RestoreRule
from specdec.settings.redis_url import parse_redis_url
from specdec.state.kv_link import KvLink

_PROBE_BYTES = 1 << 20
_PROBE_TTL_S = 120
_NUM_PROBES = 5


def measure_tier(url: str) -> tuple[RestoreRule, dict[str, Any]]:
    """Return the measured side of the rule, and what the tier's Redis states about itself (INFO).

    Raises:
        InvalidRequest: the URL is malformed.
        Unavailable: Redis cannot be reached or refuses the commands of a replica (STORE_UNAVAILABLE).
    """
    client = KvLink(url).connect()
    rule = RestoreRule()
    try:
        info: dict[str, Any] = client.info()
        _measure(client, rule)
    except (RedisError, OSError) as error:
        reason = " ".join(str(error).split())
        raise Unavailable(
            f"the KV tier at {parse_redis_url(url).place}: {reason}", reason="STORE_UNAVAILABLE"
        ) from error
    finally:
        client.close()
    return rule, info


def _measure(client: Any, rule: RestoreRule) -> None:
    key = f"specdec-kv:doctor:{_PROBE_BYTES}"
    client.set(key, bytes(_PROBE_BYTES), ex=_PROBE_TTL_S)
    for _ in range(_NUM_PROBES):
        began_s = time.perf_counter()
        client.exists(key)
        answered_s = time.perf_counter()
        value = client.get(key)
        rule.observe_latency(answered_s - began_s)
        if value:
            rule.observe_transfer(len(value), time.perf_counter() - answered_s)
    client.delete(key)
