"""Stores on a Redis Cluster of three nodes and on a primary that Sentinels name: conformance, moves and failover."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest
from redis.crc import key_slot

from specdec.cli.checks.finding import Status
from specdec.cli.checks.redis_checks import check_redis
from specdec.contract.errors import InvalidSetting, SpecdecError, Unavailable
from specdec.state.key_names import session_keys
from specdec.state.redis_store import RedisSessionStore, open_registry, open_store
from specdec.state.store import Lease, PromotionRecord, PromotionStatus
from specdec.state.store_wait import wait_for_store
from specdec.state.stored_responses import RedisResponses, ResponseRecord
from tests.contract.test_store_batches import (
    test_a_script_cancelled_before_it_was_sent_never_runs,
    test_a_script_that_fails_fails_alone,
    test_every_script_of_a_batch_gets_its_own_answer,
    test_leases_of_several_tenants_are_renewed_and_committed_in_one_message,
)
from tests.contract.test_store_faults import (
    test_a_loop_over_a_store_ends_however_many_turns_later_it_is_cancelled,
    test_a_shorter_log_is_a_lost_session_until_its_owner_repairs_it,
    test_a_store_that_forgot_rounds_takes_the_owners_next_one_after_a_repair,
)
from tests.contract.test_store_logs import (
    test_a_long_log_is_read_whole_and_from_any_position,
    test_a_started_request_is_read_back_with_all_fields,
    test_starting_a_request_again_changes_nothing,
)
from tests.support.redis_systems import RedisCluster, SentinelSystem, await_true, redis_cluster, sentinel_system
from tests.support.store_sessions import LONG_TTL_S, REQUEST, a_round, held_tokens, tokens

#: Conformance tests that run here on both systems.
__all__ = [
    "test_a_long_log_is_read_whole_and_from_any_position",
    "test_a_loop_over_a_store_ends_however_many_turns_later_it_is_cancelled",
    "test_a_script_cancelled_before_it_was_sent_never_runs",
    "test_a_script_that_fails_fails_alone",
    "test_a_shorter_log_is_a_lost_session_until_its_owner_repairs_it",
    "test_a_started_request_is_read_back_with_all_fields",
    "test_a_store_that_forgot_rounds_takes_the_owners_next_one_after_a_repair",
    "test_every_script_of_a_batch_gets_its_own_answer",
    "test_leases_of_several_tenants_are_renewed_and_committed_in_one_message",
    "test_starting_a_request_again_changes_nothing",
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelSystem]:
    with sentinel_system(tmp_path_factory.mktemp("sentinels")) as running:
        yield running


@pytest.fixture(params=["cluster", "sentinels"])
def store_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param).url)


@pytest.fixture
async def on_cluster(cluster: RedisCluster) -> AsyncIterator[RedisSessionStore]:
    store = open_store(cluster.url)
    yield store
    await store.close()


async def begin(store: RedisSessionStore, session_id: str, owner: str = "me") -> Lease:
    """Return the lease of a session of three prompt tokens with a running request."""
    lease = await store.acquire(session_id, owner=owner, ttl_s=LONG_TTL_S, create=True)
    await store.begin_request(lease, REQUEST, keep=0, token_ids=tokens(1, 2, 3))
    return lease


async def commit_when_possible(store: RedisSessionStore, lease: Lease) -> None:
    """Commit round 0 while the system recovers."""
    async with asyncio.timeout(120):
        for _ in count():
            (error,) = await store.commit_all([(lease, a_round(0, 3, 4))])
            if error is None:
                return
            assert isinstance(error, Unavailable), error
            await asyncio.sleep(0.1)


def session_of(cluster: RedisCluster, node: int) -> tuple[str, int]:
    """Return a new session id whose keys lie on a node, and their slot."""
    while True:
        session_id = f"s-{uuid.uuid4().hex}"
        slot = slot_of(session_id)
        if cluster.owner_of(slot) == node:
            return session_id, slot


def slot_of(session_id: str) -> int:
    (slot,) = {key_slot(key.encode()) for key in session_keys("default", session_id)}
    return slot


async def test_everything_that_is_not_a_session_works_on_every_system(store_url: str) -> None:
    registry, responses, store = open_registry(store_url), RedisResponses(store_url), open_store(store_url)
    assert await registry.replicas("draft") == []
    await registry.remove("unknown")
    record = ResponseRecord({"id": "r"}, [], "s", 1)
    await responses.put("default", "r", record, ttl_s=60.0)
    assert await responses.read("default", "r") == record
    await responses.delete("default", "r")
    assert await responses.read("default", "r") is None
    prefixes = store.prefixes()
    await prefixes.note([b"one", b"two"], {"replica": 2})
    assert await prefixes.holders([b"one", b"two"]) == [["replica"], ["replica"]]
    promotion = PromotionRecord("pool", 0.5, 1.0, PromotionStatus.RUNNING)
    assert await store.promotions().put(promotion) == promotion
    assert await store.promotions().put(None) is None
    await store.ping()
    for each in (registry, responses, store):
        await each.close()


async def test_any_node_leads_to_the_whole_cluster(cluster: RedisCluster) -> None:
    for node in cluster.nodes:
        store = open_store(f"redis+cluster://{node.address}")
        await store.ping()
        assert await store.load("unknown") is None
        await store.close()


async def test_sessions_spread_over_all_nodes(cluster: RedisCluster, on_cluster: RedisSessionStore) -> None:
    ids = [session_of(cluster, node)[0] for node in range(3) for _ in range(4)]
    leases = [await begin(on_cluster, session_id) for session_id in ids]
    errors = await on_cluster.commit_all([(lease, a_round(0, 3, 4)) for lease in leases])
    assert errors == [None] * len(ids)
    for node in cluster.nodes:
        assert len(node.command("KEYS", "specdec:*:tokens")) >= 4


async def test_a_session_outlives_the_move_of_its_slot(cluster: RedisCluster, on_cluster: RedisSessionStore) -> None:
    session_id, slot = session_of(cluster, 0)
    source, target = cluster.nodes[0], cluster.nodes[1]
    lease = await begin(on_cluster, session_id)
    target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.node_id(0))
    source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.node_id(1))

    # The source has some of the session's keys, so it answers TRYAGAIN until they have moved.
    committing = asyncio.create_task(on_cluster.commit(lease, a_round(0, 3, 4)))
    keys = [key.decode() for key in source.command("CLUSTER", "GETKEYSINSLOT", slot, 10)]
    source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 10_000, "KEYS", *keys)
    answered = await asyncio.gather(committing, return_exceptions=True)
    assert isinstance(answered[0], Unavailable | None)

    # The source has none of them, so it answers ASK; the target has some, so it answers TRYAGAIN to scripts, which have
    # several keys, and runs a command of one key.
    assert (await held_tokens(on_cluster, session_id))[:3] == [1, 2, 3]
    for node in (source, target):
        node.command("CLUSTER", "SETSLOT", slot, "NODE", cluster.node_id(1))
    await on_cluster.commit(lease, a_round(0, 3, 4))
    await on_cluster.commit(lease, a_round(1, 4, 5))
    assert await held_tokens(on_cluster, session_id) == [1, 2, 3, 4, 5]
    assert target.command("EXISTS", session_keys("default", session_id)[1]) == 1


async def test_a_script_without_keys_yet_runs_where_its_slot_moves_to(
    cluster: RedisCluster, on_cluster: RedisSessionStore
) -> None:
    session_id, slot = session_of(cluster, 2)
    keys = session_keys("default", session_id)
    await on_cluster.ping()
    cluster.nodes[1].command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.node_id(2))
    cluster.nodes[2].command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.node_id(1))
    # All keys exist on the receiving node, so that it runs scripts of several keys.
    with cluster.nodes[1].client() as client:
        for key in keys:
            client.execute_command("ASKING")
            client.set(key, "") if key == keys[1] else None
    assert await on_cluster.read_tokens(session_id) is not None
    for node in (cluster.nodes[1], cluster.nodes[2]):
        node.command("CLUSTER", "SETSLOT", slot, "NODE", cluster.node_id(1))
    assert (await on_cluster.acquire(session_id, owner="me", ttl_s=1.0, create=True)).session_id == session_id


async def test_a_node_that_hangs_stops_only_its_own_sessions(
    cluster: RedisCluster, on_cluster: RedisSessionStore
) -> None:
    leases = [await begin(on_cluster, session_of(cluster, node)[0]) for node in range(3)]
    cluster.nodes[2].signal(signal.SIGSTOP)
    try:
        first, second, hung = await on_cluster.commit_all([(lease, a_round(0, 3, 4)) for lease in leases])
        assert (first, second) == (None, None)
        assert isinstance(hung, Unavailable)
        assert hung.reason == "STORE_UNAVAILABLE"
        assert await on_cluster.commit_all([(leases[0], a_round(1, 4, 5))]) == [None]
    finally:
        cluster.nodes[2].signal(signal.SIGCONT)
    await commit_when_possible(on_cluster, leases[2])
    assert await held_tokens(on_cluster, leases[2].session_id) == [1, 2, 3, 4]


async def test_a_store_follows_the_primary_that_sentinels_name(sentinels: SentinelSystem) -> None:
    store = open_store(sentinels.url)
    lease = await begin(store, f"s-{uuid.uuid4().hex}")
    former, key = sentinels.primary, session_keys("default", lease.session_id)[1]
    other = next(server for server in sentinels.servers if server is not former)
    await asyncio.to_thread(await_true, lambda: other.command("STRLEN", key) == 12)
    await asyncio.to_thread(sentinels.fail_over)
    # The former primary still takes writes: the store must leave it without an error that tells.
    await asyncio.sleep(2.5)
    await commit_when_possible(store, lease)
    assert sentinels.primary.command("STRLEN", key) == 16
    await store.close()


@pytest.mark.full
async def test_a_cluster_promotes_the_replica_of_a_killed_node(tmp_path_factory: pytest.TempPathFactory) -> None:
    with redis_cluster(tmp_path_factory.mktemp("failover"), has_replica=True, node_timeout_ms=2000) as cluster:
        store = open_store(cluster.url)
        lease = await begin(store, session_of(cluster, 0)[0])
        key = session_keys("default", lease.session_id)[1]
        await asyncio.to_thread(await_true, lambda: b"slave0" in cluster.nodes[0].command("INFO", "replication"))
        await asyncio.to_thread(cluster.nodes[0].command, "WAIT", 1, 10_000)
        cluster.nodes[0].kill()
        await commit_when_possible(store, lease)
        assert cluster.nodes[3].command("STRLEN", key) == 16
        await store.close()


@pytest.mark.full
async def test_sentinels_promote_the_replica_of_a_killed_primary(tmp_path_factory: pytest.TempPathFactory) -> None:
    with sentinel_system(tmp_path_factory.mktemp("killed"), down_after_ms=1000) as system:
        store = open_store(system.url)
        lease = await begin(store, "s")
        primary = system.primary
        await asyncio.to_thread(primary.command, "WAIT", 1, 10_000)
        primary.kill()
        await commit_when_possible(store, lease)
        assert await held_tokens(store, "s") == [1, 2, 3, 4]
        await store.close()


async def refusal(url: str) -> SpecdecError:
    """Return the error of a service that starts with a URL; a wrong setting is told at once, not after a minute."""
    with pytest.raises(SpecdecError) as raised:
        await wait_for_store(url, 60.0)
    assert "\n" not in raised.value.message
    return raised.value


async def test_a_service_name_that_no_sentinel_knows_is_a_wrong_setting(sentinels: SentinelSystem) -> None:
    error = await refusal(sentinels.url.replace("/sessions", "/others"))
    assert isinstance(error, InvalidSetting)
    assert "--redis-url" in error.message
    assert "'others'" in error.message


async def test_a_server_that_is_no_cluster_and_a_wrong_password_are_wrong_settings(sentinels: SentinelSystem) -> None:
    address = sentinels.servers[0].address
    for url, words in (
        (f"redis+cluster://{address}", f"{address} is not a node of a Redis Cluster"),
        (f"redis://user:secret@{address}", "invalid username-password pair"),
    ):
        error = await refusal(url)
        assert isinstance(error, InvalidSetting)
        assert words in error.message
        assert "secret" not in error.message


async def test_the_doctor_has_no_failure_to_report_and_names_what_is_not_on_disk(store_url: str) -> None:
    found = await asyncio.to_thread(lambda: list(check_redis(store_url)))
    assert {finding.check: finding.status for finding in found}["redis persistence"] == Status.WARN
    assert not [finding for finding in found if finding.status == Status.FAIL]
