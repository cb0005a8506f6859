"""The stores that every contract test runs against: a real Redis, fakeredis in process, fakeredis over TCP."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from specdec.state.embedded import EmbeddedRedis
from tests.redis_fixture import RedisServer, redis_server, redis_url

__all__ = ["embedded_url", "redis_server", "redis_url", "store_url"]


@pytest.fixture(scope="session")
def embedded_url() -> Iterator[str]:
    with EmbeddedRedis() as embedded:
        yield embedded.url


@pytest.fixture(params=["redis", "memory", "embedded"])
def store_url(request: pytest.FixtureRequest, redis_server: RedisServer, embedded_url: str) -> str:
    return {
        "redis": redis_server.url,
        "memory": f"memory://{uuid.uuid4().hex}",
        "embedded": embedded_url,
    }[request.param]
