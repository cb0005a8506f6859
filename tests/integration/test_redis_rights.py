"""A Redis user with the rights of docs/how-to/run-redis.md, and one of an earlier version, on a real Redis."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import InvalidSetting
from specdec.contract.types import FinishReason
from specdec.state.live_coordinators import coordinator_info
from specdec.state.redis_store import RedisSessionStore, open_registry
from specdec.state.shared_quotas import QuotaLimits, QuotaOwner
from specdec.state.store import Commit, ReplicaRecord, RequestRecord
from tests.support.redis_fixture import RedisServer

PAGE = Path(__file__).parents[2] / "docs/how-to/run-redis.md"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


def url_of_user(server: RedisServer, *, without: str = "") -> str:
    """Make the page's user, and return the URL with it."""
    (command,) = re.findall(r"^redis-cli (ACL SETUSER specdec (?:.|\n)*?)\n```", PAGE.read_text(), re.MULTILINE)
    words = [word for word in shlex.split(command.replace("\\\n", " ")) if word != without]
    with redis.Redis.from_url(server.url) as client:
        client.execute_command(*words)
    return server.url.replace("unix://", "unix://specdec:PASSWORD@")


async def test_the_rights_of_the_page_are_enough_for_sessions_usage_limits_and_the_registry(
    server: RedisServer,
) -> None:
    url = url_of_user(server)
    store = RedisSessionStore(url, session_ttl_s=0.2, usage_kept_s=3600.0)
    usage = store.usage()
    await usage.check_rights()
    await usage.note_kept(3600.0)
    for turn, reason in enumerate((None, FinishReason.STOP)):
        lease = await store.acquire("s", owner="me", ttl_s=60.0, create=True)
        request = RequestRecord(f"r{turn}", "digest", "{}", turn=turn, output_start=2)
        await store.begin_request(lease, request, keep=0, token_ids=np.array([1, 2], np.uint32))
        await store.commit(lease, Commit(turn, 2, np.array([3], np.uint32), "{}", reason, b"hash"))
        await store.renew(lease)
        await store.release(lease)
    assert [record.outcome async for record in usage.read(0, 1 << 45)] == ["broken", "stop"]
    await usage.record_expired()
    await store.delete("s")
    quotas = store.quotas("p", lease_ttl_s=30.0)
    assert await quotas.take(QuotaOwner("acme"), QuotaLimits(1, 1, 1), lambda: 0) is None
    quotas.entered(QuotaOwner("acme"))
    await quotas.close()
    await store.prefixes().note([b"a" * 16], {"holder": 1})
    assert await store.prefixes().holders([b"a" * 16]) == [["holder"]]
    registry = open_registry(url)
    await registry.publish(ReplicaRecord("127.0.0.1:1", _coordinator()), ttl_s=5.0)
    assert len(await registry.replicas("coordinator")) == 1
    await registry.close()
    await store.close()


async def test_a_user_of_an_earlier_version_is_refused_before_its_first_turn_fails(server: RedisServer) -> None:
    store = RedisSessionStore(url_of_user(server, without="+xadd"), usage_kept_s=3600.0)
    with pytest.raises(InvalidSetting, match=r"may not write usage records .* or set --usage-days 0"):
        await store.usage().check_rights()
    await store.close()


def _coordinator() -> EngineInfo:
    return coordinator_info("c", version="1", model="m", vocabulary_fingerprint="f", num_running=0)
