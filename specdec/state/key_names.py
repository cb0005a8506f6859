"""Names of all keys that specdec keeps in Redis, and the packing of token ids.

Keys begin with `specdec:` in the default cluster, and with `specdec@NAME:` in the cluster NAME. No name contains a
colon, so no key belongs to two clusters. The hash tag in braces is the same in every cluster.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from specdec.contract.errors import InvalidRequest
from specdec.contract.tenant import check_tenant
from specdec.contract.types import TokenIds
from specdec.settings.cluster_names import DEFAULT_CLUSTER

#: Token ids in Redis: unsigned, 32 bits, little-endian, without separators.
PACKED_TOKEN = np.dtype("<u4")
TOKEN_BYTES = PACKED_TOKEN.itemsize

MAX_SESSION_ID_CHARS = 256

# Braces delimit the cluster's hash tag; a session id with a brace would spread its keys over slots.
_SESSION_ID = re.compile(rf"[^{{}}\x00-\x1f\x7f\ud800-\udfff]{{1,{MAX_SESSION_ID_CHARS}}}")


def key_prefix(cluster: str) -> str:
    """Return the beginning of every key of a cluster."""
    return "specdec:" if cluster == DEFAULT_CLUSTER else f"specdec@{cluster}:"


@lru_cache(maxsize=4096)
def session_keys(tenant: str, session_id: str, cluster: str = DEFAULT_CLUSTER) -> tuple[str, str, str, str]:
    """Return the keys of one session, all in one slot of a Redis Cluster: meta, tokens, lease and deletion mark.

    Raises:
        InvalidRequest: the id is empty, longer than 256 characters or holds braces or control characters.
    """
    if not _SESSION_ID.fullmatch(session_id):
        raise InvalidRequest(
            f"session_id must be 1 to {MAX_SESSION_ID_CHARS} characters without braces or control characters",
            field="session_id",
        )
    stem = f"{key_prefix(cluster)}{tenant}:{{{session_id}}}"
    return f"{stem}:meta", f"{stem}:tokens", f"{stem}:lease", f"{stem}:deleted"


def replica_keys(role: str, cluster: str = DEFAULT_CLUSTER) -> list[str]:
    """Return the keys of one role's replicas, both in one slot of a Redis Cluster: records, expiry."""
    stem = f"{key_prefix(cluster)}replicas:{{{role}}}"
    return [f"{stem}:records", f"{stem}:expiry"]


def prefix_keys(tenant: str, chain_hashes: Sequence[bytes], cluster: str = DEFAULT_CLUSTER) -> list[str]:
    """Return the keys of one chain's prefixes, all in one slot of a Redis Cluster, which the first prefix chooses."""
    stem = f"{key_prefix(cluster)}{tenant}:prefix:{{{chain_hashes[0].hex()}}}"
    return [f"{stem}:{chain_hash.hex()}" for chain_hash in chain_hashes]


def promotion_key(tenant: str, cluster: str = DEFAULT_CLUSTER) -> str:
    """Return the key of the tenant's promotion of a draft pool."""
    return f"{key_prefix(cluster)}{tenant}:promotion"


def target_share_key(tenant: str, cluster: str = DEFAULT_CLUSTER) -> str:
    """Return the key of the share of new sessions that an operator gave to a target model."""
    return f"{key_prefix(cluster)}{tenant}:target_share"


def response_key(tenant: str, response_id: str, cluster: str = DEFAULT_CLUSTER) -> str:
    """Return the key of a response that the gateway has stored. Raises InvalidRequest for a malformed tenant."""
    return f"{key_prefix(cluster)}{check_tenant(tenant)}:response:{response_id}"


def quota_key(tenant: str, key_id: str = "", cluster: str = DEFAULT_CLUSTER) -> str:
    """Return the key of what a tenant, or one of its API keys, uses of its limits."""
    stem = f"{key_prefix(cluster)}{check_tenant(tenant)}:quota"
    return f"{stem}:{key_id}" if key_id else stem


def pack_tokens(token_ids: TokenIds) -> bytes:
    """Pack token ids, uint32 [n], into 4n bytes."""
    return np.ascontiguousarray(token_ids, dtype=PACKED_TOKEN).tobytes()


def unpack_tokens(packed: bytes) -> TokenIds:
    """Unpack 4n bytes into uint32 [n]; the bytes of an incomplete last token are dropped."""
    whole = len(packed) - len(packed) % TOKEN_BYTES
    return np.frombuffer(packed[:whole], dtype=PACKED_TOKEN).astype(np.uint32)
