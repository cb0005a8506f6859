"""Prefixes are looked up at growing lengths, in bounded time, and noted in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from coordinator.replicas import prefixes as module
from coordinator.replicas.placement import FIRST_REQUEST_ROWS, PrefixRule, SessionReplicas
from coordinator.replicas.pool import ReplicaPools
from coordinator.replicas.prefixes import LOOK_UP_TIMEOUT_S, MAX_NOTES, Prefixes, prefix_lengths
from coordinator.replicas.replica import TARGET, TargetReplica
from specdec.contract.engine_api import EngineInfo
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import BLOCK_TOKENS
from specdec.core.chain import ChainHasher
from specdec.rpc.client import TargetLink, open_link
from specdec.state.connection import RedisConnection
from specdec.state.prefix_directory import RedisPrefixDirectory
from specdec.state.redis_store import RedisSessionStore, open_store
from specdec.state.store import KvLocation


def test_prefixes_have_doubling_lengths_from_four_blocks_on_and_end_at_the_last_full_block() -> None:
    assert prefix_lengths(0) == prefix_lengths(63) == []
    assert prefix_lengths(64) == prefix_lengths(79) == [64]
    assert prefix_lengths(80) == [64, 80]
    assert prefix_lengths(1_000) == [64, 128, 256, 512, 992]
    assert prefix_lengths(1_024) == [64, 128, 256, 512, 1_024]
    assert len(prefix_lengths(131_072)) == 12


@pytest.fixture
async def store() -> AsyncIterator[RedisSessionStore]:
    store = open_store(f"memory://{time.monotonic_ns()}")
    yield store
    await store.close()


async def settled(prefixes: Prefixes) -> None:
    await asyncio.gather(*prefixes._notes)


async def held(prefixes: Prefixes, num_tokens: int, hash_at: Callable[[int], bytes]) -> dict[str, int]:
    return await prefixes.answer(prefixes.look_up(DEFAULT_TENANT, num_tokens, hash_at))


async def test_prefixes_of_an_adapter_are_found_for_it_alone(store: RedisSessionStore) -> None:
    prefixes, tokens = Prefixes(store.prefixes()), ChainHasher(range(1, 1_001))
    for adapter, holder in (("", "base"), ("a" * 32, "first"), ("b" * 32, "second")):
        prefixes.note(DEFAULT_TENANT, tokens.at, {holder: 1_000}, adapter)
    await settled(prefixes)
    found = {}
    for adapter in ("", "a" * 32, "b" * 32, "c" * 32):
        found[adapter[:1]] = await prefixes.answer(prefixes.look_up(DEFAULT_TENANT, 1_000, tokens.at, adapter))
    assert found == {"": {"base": 992}, "a": {"first": 992}, "b": {"second": 992}, "c": {}}


async def test_a_prefix_that_two_prompts_share_is_found_at_the_longest_noted_length(
    store: RedisSessionStore,
) -> None:
    prefixes = Prefixes(store.prefixes())
    shared = list(range(1, 1_001))
    ours, theirs = ChainHasher([*shared, 7]), ChainHasher([*shared, 8] * 2)
    prefixes.note(DEFAULT_TENANT, ours.at, {"target": 1_001, "draft": 300, "nothing": 63})
    await settled(prefixes)
    assert await held(prefixes, 1_001, ours.at) == {"target": 992, "draft": 256}
    assert await held(prefixes, 2_002, theirs.at) == {"target": 512, "draft": 256}
    assert await held(prefixes, 1_001, ChainHasher([9, *shared]).at) == {}
    assert await held(prefixes, 63, ours.at) == {}


async def test_without_a_directory_nothing_is_known_and_nothing_is_noted() -> None:
    prefixes = Prefixes(None)
    prefixes.note(DEFAULT_TENANT, ChainHasher(range(100)).at, {"a": 100})
    assert await held(prefixes, 100, ChainHasher(range(100)).at) == {}
    await prefixes.close()


@pytest.fixture
async def silent_url() -> AsyncIterator[str]:
    """A server that takes connections and never answers."""

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_a_directory_that_does_not_answer_in_time_is_ignored_and_logged_once(
    silent_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection = RedisConnection(silent_url)
    prefixes = Prefixes(RedisPrefixDirectory(connection, "default"))
    hashes = ChainHasher(range(100))
    async with asyncio.timeout(20 * LOOK_UP_TIMEOUT_S):
        for _ in range(3):
            assert await held(prefixes, 100, hashes.at) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "prefix directory unavailable: no answer within 0.1 s"
    ]
    for _ in range(3 * MAX_NOTES):
        prefixes.note(DEFAULT_TENANT, hashes.at, {"a": 100})
    assert len(prefixes._notes) == MAX_NOTES
    async with asyncio.timeout(5):
        await prefixes.close()
        await connection.close()


async def test_a_directory_that_answers_again_is_used_again(
    store: RedisSessionStore, silent_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_UP_TIMEOUT_S", 0.01)
    connection, hashes = RedisConnection(silent_url), ChainHasher(range(100))
    prefixes = Prefixes(RedisPrefixDirectory(connection, "default"))
    assert await held(prefixes, 100, hashes.at) == {}
    prefixes._directory = store.prefixes()
    monkeypatch.setattr(module, "LOOK_UP_TIMEOUT_S", 5.0)
    prefixes.note(DEFAULT_TENANT, hashes.at, {"a": 100})
    await settled(prefixes)
    assert await held(prefixes, 100, hashes.at) == {"a": 96}
    await connection.close()


# ---- the rule ------------------------------------------------------------------------------------------------------


def replica(
    name: str, *, num_running: int = 0, incarnation: str | None = None, draining: bool = False
) -> TargetReplica:
    made = TargetReplica(TARGET, f"{name}:1", TargetLink(f"{name}:1"))
    made.info = EngineInfo(
        version="0", role=TARGET, pool="default", replica_id=name, model="m", model_fingerprint="m",
        vocabulary_fingerprint="v", vocabulary_size=10, max_context_tokens=100, eos_token_ids=(1,), max_gamma=4,
        num_kv_blocks=1, kv_block_tokens=BLOCK_TOKENS, kv_usage=0.0, num_sessions=num_running, draining=draining,
        dtype="float32", device="cpu", incarnation=name if incarnation is None else incarnation,
        num_running=num_running,
    )  # fmt: skip
    made.is_alive = True
    return made


def test_a_holder_gets_the_session_until_it_is_busier_by_more_than_its_prefix_saves() -> None:
    rule = PrefixRule()
    for _ in range(50):
        rule.note_request(100)
    assert rule.request_rows == pytest.approx(100)
    idle = replica("idle")
    for num_running in range(12):
        holder = replica("holder", num_running=num_running)
        chosen = rule.choose(idle, [idle, holder], {"holder": 512})
        assert chosen is (holder if num_running <= 5 else idle)


def test_of_two_holders_the_one_that_saves_more_rows_is_chosen() -> None:
    rule = PrefixRule()
    usual, shallow, deep = replica("usual"), replica("shallow"), replica("deep", num_running=2)
    held = {"shallow": 128, "deep": 128 + 2 * int(FIRST_REQUEST_ROWS) + 1}
    assert rule.choose(usual, [usual, shallow, deep], held) is deep
    held["deep"] -= 2
    assert rule.choose(usual, [usual, shallow, deep], held) is shallow


def test_the_usual_replica_is_kept_where_it_holds_as_much() -> None:
    usual, other = replica("usual"), replica("other")
    assert PrefixRule().choose(usual, [other, usual], {"usual": 64, "other": 64}) is usual


def test_a_replica_without_a_valid_incarnation_holds_nothing() -> None:
    usual = replica("usual")
    for incarnation in ("", "no name", "x" * 65, "\u0661"):
        nameless = replica("nameless", incarnation=incarnation)
        assert nameless.incarnation == ""
        assert PrefixRule().choose(usual, [usual, nameless], {incarnation or "none": 512}) is usual


async def test_holders_that_take_no_sessions_are_skipped() -> None:
    pools = ReplicaPools("v", open_link)
    dead, draining, other = replica("dead"), replica("draining", draining=True), replica("other")
    dead.is_alive = False
    pools._replicas = {(TARGET, each.address): each for each in (dead, draining, other)}
    replicas = SessionReplicas("s", pools)
    replicas.target_fingerprint = "m"
    replicas.begin_turn(0, (), {"dead": 512, "draining": 512})
    assert replicas.choose_target() is other


@pytest.mark.parametrize("name", ["dead", "draining", "late", "of another model"])
async def test_a_session_does_not_return_to_a_replica_that_cannot_take_it(name: str) -> None:
    pools = ReplicaPools("v", open_link)
    home, other = replica("home", draining=name == "draining"), replica("other", num_running=1)
    home.is_alive = name != "dead"
    if name == "late":
        home.health.note_late(called_at=1.0, heard_at=0.0)
    if name == "of another model":
        home.info = replace(home.info, model_fingerprint="another")  # type: ignore[type-var]
    pools._replicas = {(TARGET, each.address): each for each in (home, other)}
    replicas = SessionReplicas("s", pools)
    replicas.target_fingerprint = "m"
    replicas.begin_turn(100, [KvLocation("home", 99)], {})
    assert replicas.choose_target() is other
    assert replicas.start_for(other, 120) == 0


async def test_a_session_returns_to_the_replica_of_its_kv_however_busy_that_is() -> None:
    pools = ReplicaPools("v", open_link)
    home, other = replica("home", num_running=99), replica("other")
    pools._replicas = {(TARGET, each.address): each for each in (home, other)}
    replicas = SessionReplicas("s", pools)
    replicas.target_fingerprint = "m"
    for agreed_len, start in ((100, 90), (60, 60)):
        replicas.begin_turn(agreed_len, [KvLocation("home", 90)], {"other": 64})
        assert replicas.choose_target() is home
        assert replicas.start_for(home, 120) == start
    assert replicas.locations == [KvLocation("home", 60)]
