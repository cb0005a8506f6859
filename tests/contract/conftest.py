"""The stores that every contract test runs against (Redis, fakeredis in process and over a socket), with a session."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from specdec.state.connection import RedisConnection
from specdec.state.embedded import EmbeddedRedis
from specdec.state.redis_store import open_store
from specdec.state.store import Lease, SessionStore
from tests.support.redis_fixture import redis_server, redis_url
from tests.support.store_sessions import LONG_TTL_S, REQUEST, tokens

__all__ = ["embedded_url", "redis_server", "redis_url", "store_url"]


@pytest.fixture(scope="session")
def embedded_url() -> Iterator[str]:
    with EmbeddedRedis() as embedded:
        yield embedded.url


@pytest.fixture(params=["redis", "memory", "embedded"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Start only the server of the test's store."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    if request.param == "embedded":
        return str(request.getfixturevalue("embedded_url"))
    return str(request.getfixturevalue("redis_server").url)


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[SessionStore]:
    store = open_store(store_url)
    yield store
    await store.close()


@pytest.fixture
async def raw(store_url: str) -> AsyncIterator[RedisConnection]:
    """Return a connection to the store's keys, for damage as by a failing Redis."""
    connection = RedisConnection(store_url)
    yield connection
    await connection.close()


@pytest.fixture
def session_id() -> str:
    return f"s-{uuid.uuid4().hex}"


@pytest.fixture
async def lease(store: SessionStore, session_id: str) -> Lease:
    """Return the lease of a session of three prompt tokens with a running request."""
    lease = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    await store.begin_request(lease, REQUEST, keep=0, token_ids=tokens(1, 2, 3))
    return lease
