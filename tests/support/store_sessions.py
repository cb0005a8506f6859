"""Sessions for the contract tests of `specdec.state.store`: a request, its rounds, its log, and the loss of it.

Fixtures are in `tests/contract/conftest.py`.
"""

from __future__ import annotations

import asyncio
import json

import numpy as np

from specdec.contract.errors import SessionBusy
from specdec.contract.types import FinishReason, TokenIds
from specdec.state.connection import RedisConnection
from specdec.state.key_names import session_keys
from specdec.state.store import Commit, Lease, RequestRecord, SessionStore

LONG_TTL_S = 60.0
SHORT_TTL_S = 0.05

REQUEST = RequestRecord("r-1", "digest", '{"temperature": 0.7}', turn=0, output_start=3)


def tokens(*token_ids: int) -> TokenIds:
    return np.asarray(token_ids, np.uint32)


def a_round(round_id: int, base_len: int, *token_ids: int, finish_reason: FinishReason | None = None) -> Commit:
    chain_hash = repr((base_len, token_ids)).encode()  # a store only compares it
    return Commit(
        round_id, base_len, tokens(*token_ids), json.dumps({"num_rounds": round_id}), finish_reason, chain_hash
    )


async def take_over(store: SessionStore, lease: Lease, keep: int) -> None:
    """Begin a request whose first `keep` tokens the log holds already, as an owner does before its first commit."""
    await store.begin_request(lease, REQUEST, keep=keep, token_ids=tokens())


async def held_tokens(store: SessionStore, session_id: str) -> list[int]:
    return (await store.read_tokens(session_id)).tolist()


async def lose_tokens(raw: RedisConnection, session_id: str, keep: int) -> None:
    key = session_keys("default", session_id)[1]
    kept = await raw.run_command("GETRANGE", key, 0, keep * 4 - 1) if keep else b""
    await raw.run_command("SET", key, kept)


async def forget_session(raw: RedisConnection, session_id: str) -> None:
    """Remove a session's keys without a deletion mark, as an expiry or a flush does."""
    await raw.run_command("DEL", *session_keys("default", session_id))


async def acquire_when_free(store: SessionStore, session_id: str, owner: str) -> Lease:
    async with asyncio.timeout(10):
        while True:
            try:
                return await store.acquire(session_id, owner=owner, ttl_s=LONG_TTL_S, create=False)
            except SessionBusy:
                continue
