"""The share of a target model in the store: kept, replaced, removed, and refused where another program wrote it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from specdec.contract.errors import Internal
from specdec.state.connection import RedisConnection
from specdec.state.key_names import target_share_key
from specdec.state.redis_store import RedisSessionStore, open_store
from specdec.state.store import TargetShare


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[RedisSessionStore]:
    opened = open_store(store_url, tenant="shares-" + secrets.token_hex(4))
    yield opened
    await opened.close()


async def test_the_last_decision_is_kept_for_every_coordinator_of_the_tenant(store: RedisSessionStore) -> None:
    shares, other = store.target_shares(), store.of_tenant("other-" + secrets.token_hex(4)).target_shares()
    assert await shares.read() is None
    for share in (TargetShare("aa", 0.25), TargetShare("bb", 0.0), TargetShare("bb", 1.0)):
        await shares.put(share)
        assert await store.target_shares().read() == share
    assert await other.read() is None
    await shares.put(None)
    assert await shares.read() is None


@pytest.mark.parametrize(
    "value",
    ["x", "[]", "{}", '{"fingerprint": "", "share": 0.5}', '{"fingerprint": "a", "share": 1.5}',
     '{"fingerprint": "a", "share": NaN}', '{"fingerprint": "a", "share": 1e999}', " " * 2000],
)  # fmt: skip
async def test_a_record_that_is_none_is_an_error_until_it_is_replaced(
    raw: RedisConnection, store_url: str, value: str
) -> None:
    tenant = "shares-" + secrets.token_hex(4)
    store = open_store(store_url, tenant=tenant)
    await raw.run_command("SET", target_share_key(tenant), value)
    with pytest.raises(Internal, match="target share"):
        await store.target_shares().read()
    await store.target_shares().put(TargetShare("a", 0.5))
    assert await store.target_shares().read() == TargetShare("a", 0.5)
    await store.close()
