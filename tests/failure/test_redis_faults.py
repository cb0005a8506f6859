"""A Redis that is absent, full, slow, read-only, protected, or that lost the end of its log of writes."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from specdec.contract.errors import InvalidSetting, SessionLost, Unavailable
from specdec.state import clients
from specdec.state.connection import RedisConnection
from specdec.state.key_names import session_keys
from specdec.state.redis_store import RedisSessionStore, open_registry, open_store
from specdec.state.store import Lease, PromotionRecord, PromotionStatus
from specdec.state.store_wait import store_answers, wait_for_store
from specdec.state.stored_responses import RedisResponses, ResponseRecord
from tests.support.certificates import Authority
from tests.support.redis_fixture import RedisServer
from tests.support.redis_systems import TcpRedis, tcp_redis
from tests.support.stack import free_port
from tests.support.store_sessions import LONG_TTL_S, REQUEST, a_round, held_tokens, tokens

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "run-redis.md"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TcpRedis]:
    with tcp_redis(tmp_path, "--enable-debug-command", "local") as running:
        yield running


@pytest.fixture
async def store(server: TcpRedis) -> AsyncIterator[RedisSessionStore]:
    store = open_store(f"redis://{server.address}")
    await wait_for_store(f"redis://{server.address}", 60.0)
    yield store
    await store.close()


async def begin(store: RedisSessionStore, session_id: str = "s") -> Lease:
    lease = await store.acquire(session_id, owner="me", ttl_s=LONG_TTL_S, create=True)
    await store.begin_request(lease, REQUEST, keep=0, token_ids=tokens(1, 2, 3))
    return lease


# ---- absent ----------------------------------------------------------------------------------------------------------


async def test_a_service_waits_for_a_store_that_starts_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specdec.state.store_wait")
    server = TcpRedis(tmp_path)
    waiting = asyncio.create_task(wait_for_store(f"redis://{server.address}", 60.0))
    while not caplog.records:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    server.start()
    try:
        await waiting
    finally:
        server.kill()
    waits, answers = [record.message for record in caplog.records]
    assert waits.startswith(f"waiting for the store for at most 60 s: the store at redis://{server.address} is ")
    assert "Connection refused" in waits
    assert answers == "the store answers"


async def test_a_wait_ends_after_its_limit_and_with_the_service() -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    for wait_s in (0.0, 0.6):
        with pytest.raises(Unavailable, match="is not available"):
            await wait_for_store(url, wait_s)
    stop = asyncio.Event()
    waiting = asyncio.create_task(store_answers(url, 60.0, stop))
    await asyncio.sleep(0.1)
    stop.set()
    assert not await waiting


def test_a_service_with_a_wrong_redis_ends_with_code_2_and_one_line(server: TcpRedis) -> None:
    with server.client() as client:
        client.ping()
    command = [sys.executable, "-m", "gateway", "--listen", "127.0.0.1:0"]
    url = f"redis+cluster://{server.address}"
    ended = subprocess.run([*command, "--redis-url", url], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"--redis-url {url}: {server.address} is not a node of a Redis Cluster" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


# ---- full, slow, read-only -------------------------------------------------------------------------------------------


async def test_a_full_store_refuses_in_words_and_writes_nothing(server: TcpRedis, store: RedisSessionStore) -> None:
    lease = await begin(store)
    before = await store.load("s"), await held_tokens(store, "s")
    server.command("CONFIG", "SET", "maxmemory", 1)
    refused = [
        store.commit(lease, a_round(0, 3, 4)),
        store.begin_request(lease, REQUEST, keep=3, token_ids=tokens(4)),
        store.acquire("other", owner="me", ttl_s=LONG_TTL_S, create=True),
        store.acquire("s", owner="me", ttl_s=LONG_TTL_S, create=False),
    ]
    for call in refused:
        with pytest.raises(Unavailable, match=r"its memory is full \(maxmemory\); nothing was written") as raised:
            await call
        assert raised.value.reason == "STORE_UNAVAILABLE"
    after = await store.load("s"), await held_tokens(store, "s")
    assert before[1] == after[1]
    assert before[0] is not None
    assert after[0] is not None
    assert (before[0].epoch, before[0].round_id, before[0].request) == (after[0].epoch, after[0].round_id, REQUEST)
    await store.renew(lease)
    server.command("CONFIG", "SET", "maxmemory", 0)
    await store.commit(lease, a_round(0, 3, 4))
    assert await held_tokens(store, "s") == [1, 2, 3, 4]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MB, which root alone may do."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="root alone may mount a small file system")
async def test_a_store_whose_disk_is_full_refuses_writes_and_keeps_all_that_it_accepted(small_disk: Path) -> None:
    with tcp_redis(small_disk, "--appendonly", "yes", "--appendfsync", "everysec") as server:
        store = open_store(f"redis://{server.address}")
        await wait_for_store(f"redis://{server.address}", 60.0)
        lease = await begin(store)
        held, rest = [1, 2, 3], small_disk / "rest"
        rest.write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize))
        # The last page of the log still has room for some commits.
        while (refused := await store.commit_all([(lease, a_round(len(held) - 3, len(held), 9))])) == [None]:
            held.append(9)
        assert isinstance(refused[0], Unavailable)
        assert "No space left on device" in refused[0].message
        assert await held_tokens(store, "s") == held
        rest.unlink()
        async with asyncio.timeout(60):
            while await store.commit_all([(lease, a_round(len(held) - 3, len(held), 8))]) != [None]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert await held_tokens(store, "s") == [*held, 8]
        server.kill()
        server.start()
        await wait_for_store(f"redis://{server.address}", 60.0)
        assert await held_tokens(store, "s") == [*held, 8]
        await store.close()


async def test_a_commit_behind_a_slow_command_is_written_once(
    server: TcpRedis, store: RedisSessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "REPLY_TIMEOUT_S", 0.2)
    impatient = open_store(f"redis://{server.address}")
    lease = await begin(impatient)
    slow = asyncio.create_task(asyncio.to_thread(server.command, "DEBUG", "SLEEP", 1))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(60):
        while await impatient.commit_all([(lease, a_round(0, 3, 4))]) != [None]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await slow
    assert await held_tokens(impatient, "s") == [1, 2, 3, 4]
    await impatient.close()


async def test_a_replica_is_named_and_left_as_soon_as_it_is_the_primary(
    server: TcpRedis, store: RedisSessionStore
) -> None:
    lease = await begin(store)
    server.command("REPLICAOF", "127.0.0.1", free_port())
    with pytest.raises(Unavailable, match="it is a read-only replica, and writes need the primary"):
        await store.commit(lease, a_round(0, 3, 4))
    server.command("REPLICAOF", "NO", "ONE")
    await store.commit(lease, a_round(0, 3, 4))
    assert await held_tokens(store, "s") == [1, 2, 3, 4]


# ---- TLS and a user with few rights ----------------------------------------------------------------------------------


def documented_rights() -> str:
    """Return the arguments of the guide's ACL SETUSER."""
    (command,) = re.findall(r"^redis-cli ACL SETUSER ((?:.*\\\n)*.*)", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    return " ".join(shlex.split(command.replace("\\\n", " ")))


async def use_everything(url: str, cluster: str) -> None:
    """Use every command of specdec."""
    registry = open_registry(url, cluster=cluster)
    responses = RedisResponses(url, cluster=cluster)
    store = open_store(url, cluster=cluster)
    await store.ping()
    lease = await begin(store)
    await store.commit(lease, a_round(0, 3, 4))
    await store.renew(lease)
    await store.begin_request(lease, REQUEST, keep=2, token_ids=tokens(7))
    assert await held_tokens(store, "s") == [1, 2, 7]
    assert await store.load("s") is not None
    await store.release(lease)
    await store.discard(await store.acquire("s", owner="me", ttl_s=LONG_TTL_S, create=False))
    await store.delete("s")
    await store.prefixes().note([b"one"], {"replica": 1})
    assert await store.prefixes().holders([b"one"]) == [["replica"]]
    promotion = PromotionRecord("pool", 0.5, 1.0, PromotionStatus.RUNNING)
    assert await store.promotions().put(promotion) == await store.promotions().read() == promotion
    await store.promotions().put(None)
    await responses.put("default", "r", ResponseRecord({}, [], "s", 1), ttl_s=60.0)
    assert await responses.read("default", "r") is not None
    await responses.delete("default", "r")
    assert await registry.replicas("draft") == []
    await registry.remove("unknown")
    for each in (registry, responses, store):
        await each.close()


async def test_tls_and_the_documented_rights_are_enough_and_no_more(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, other = authority.issue("own"), authority.issue("other")
    files = ["--tls-cert-file", own.cert, "--tls-key-file", own.key, "--tls-ca-cert-file", authority.path]
    config = f"user default off\nuser {documented_rights().replace('PASSWORD', 'secret')}\n"
    trusted = f"ssl_ca_certs={authority.path}&ssl_certfile={other.cert}&ssl_keyfile={other.key}"
    with tcp_redis(tmp_path / "redis", *files, config=config, scheme="rediss") as server:
        url = f"rediss://specdec:secret@{server.address}?{trusted}"
        await wait_for_store(url, 60.0)
        await use_everything(url, "default")
        await use_everything(url, "east")
        intruder = RedisConnection(url)
        for command in (("GET", "others"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*")):
            with pytest.raises(Unavailable, match="permissions"):
                await intruder.run_command(*command)
        await intruder.close()
        with pytest.raises(Unavailable, match="certificate verify failed"):
            await wait_for_store(f"rediss://specdec:secret@{server.address}", 0.0)
    with pytest.raises(InvalidSetting, match=r"ssl_certfile=.*own.pem and ssl_keyfile=.*other.key cannot be used"):
        open_store(f"rediss://h?ssl_certfile={own.cert}&ssl_keyfile={other.key}")
    with pytest.raises(InvalidSetting, match=r"ssl_ca_certs=/missing cannot be used: No such file"):
        open_store("rediss://h?ssl_ca_certs=/missing")


async def test_sentinels_and_nodes_of_a_cluster_get_the_files_of_the_url(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("own")
    files = ["--tls-cert-file", own.cert, "--tls-key-file", own.key, "--tls-ca-cert-file", authority.path]
    files += ["--tls-replication", "yes", "--tls-cluster", "yes"]
    trusted = f"ssl_ca_certs={authority.path}&ssl_certfile={own.cert}&ssl_keyfile={own.key}"
    alone = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
    with ExitStack() as stack:
        primary = stack.enter_context(tcp_redis(tmp_path / "primary", *files, scheme="rediss"))
        watched = f"sentinel monitor sessions 127.0.0.1 {primary.port} 1\n"
        sentinel = stack.enter_context(
            tcp_redis(tmp_path / "sentinel", *files, "--sentinel", config=watched, scheme="rediss")
        )
        node = stack.enter_context(tcp_redis(tmp_path / "node", *files, *alone, scheme="rediss"))
        with node.client(ssl=True, ssl_ca_certs=authority.path, ssl_certfile=own.cert, ssl_keyfile=own.key) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        for url in (f"rediss+sentinel://{sentinel.address}/sessions", f"rediss+cluster://{node.address}"):
            await wait_for_store(f"{url}?{trusted}", 60.0)
            await use_everything(f"{url}?{trusted}", "default")


# ---- clusters on one Redis -------------------------------------------------------------------------------------------


async def test_two_clusters_on_one_redis_share_nothing(server: TcpRedis, store: RedisSessionStore) -> None:
    url = f"redis://{server.address}"
    east = open_store(url, cluster="east")
    await begin(store)
    assert await east.load("s") is None
    lease = await begin(east)
    await east.commit(lease, a_round(0, 3, 9))
    assert await held_tokens(store, "s") == [1, 2, 3]
    assert await held_tokens(east.reopen().of_tenant("default"), "s") == [1, 2, 3, 9]
    await east.prefixes().of_tenant("t").note([b"one"], {"replica": 1})
    assert await store.prefixes().of_tenant("t").holders([b"one"]) == [[]]
    await east.promotions().put(PromotionRecord("pool", 0.5, 1.0, PromotionStatus.RUNNING))
    assert await store.promotions().read() is None
    keys = server.command("KEYS", "*")
    assert {key.partition(b":")[0] for key in keys} == {b"specdec", b"specdec@east"}
    assert session_keys("t", "s", "east")[1] == "specdec@east:t:{s}:tokens"
    await east.close()


# ---- the log of writes -----------------------------------------------------------------------------------------------


class Logged:
    """A Redis with a log of writes, a session of three rounds, and the size of the log after each step."""

    def __init__(self, directory: Path, policy: str) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.server = RedisServer(directory, keeps_log=True, arguments=["--appendfsync", policy])
        self.server.start()
        self.store = open_store(self.server.url)
        self.sizes: list[int] = []
        """Size after the beginning of the request and after each round."""

    async def run(self) -> Lease:
        lease = await begin(self.store)
        await self._note_size()
        for round_id in range(3):
            await self.store.commit(lease, a_round(round_id, 3 + round_id, 10 + round_id))
            await self._note_size()
        return lease

    async def _note_size(self) -> None:
        """Wait until the log has everything: Redis holds writes back for up to 2 s while it syncs the disk."""
        raw = RedisConnection(self.server.url)
        async with asyncio.timeout(60):
            while (await raw.run_command("INFO", "persistence"))["aof_buffer_length"] > 0:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await raw.close()
        (log,) = (self._directory / "appendonlydir").glob("*.incr.aof")
        self.sizes.append(log.stat().st_size)

    async def crash(self, kept_bytes: int) -> None:
        """Kill Redis, cut its log of writes, and start it again."""
        await asyncio.to_thread(self.server.restart_without_its_last, self.server.log_size - kept_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.store.close()
        self.server.stop()


@pytest.mark.parametrize("policy", ["always", "everysec"])
async def test_a_killed_redis_has_every_commit_that_reached_its_log(tmp_path: Path, policy: str) -> None:
    async with Logged(tmp_path, policy) as logged:
        await logged.run()
        await logged.crash(logged.sizes[-1])
        assert await held_tokens(logged.store, "s") == [1, 2, 3, 10, 11, 12]


async def test_a_machine_that_loses_the_last_second_loses_whole_rounds_which_their_owner_repairs(
    tmp_path: Path,
) -> None:
    """`everysec`: what was not synced is lost with the machine, and the log may end within a command."""
    whole = [1, 2, 3, 10, 11, 12]
    for index in range(5):
        async with Logged(tmp_path / str(index), "everysec") as logged:
            lease = await logged.run()
            start, _, second, third = logged.sizes
            cuts = [(third - 1, 2), ((second + third) // 2, 2), (second, 2), (second - 1, 1), (start, 0)]
            kept_bytes, num_rounds = cuts[index]
            await logged.crash(kept_bytes)
            record, left = await logged.store.load("s"), await held_tokens(logged.store, "s")
            assert left == whole[: 3 + num_rounds]
            assert record is not None
            assert record.round_id == num_rounds, "a round is in the log of writes as a whole or not at all"
            with pytest.raises(SessionLost):
                await logged.store.commit(lease, a_round(3, 6, 13))
            lost = tokens(*whole[len(left) :])
            await logged.store.begin_request(lease, REQUEST, keep=len(left), token_ids=lost, round_id=3)
            await logged.store.commit(lease, a_round(3, 6, 13))
            assert await held_tokens(logged.store, "s") == [*whole, 13]


@pytest.mark.parametrize("command", ["SETRANGE", "HSET", "PEXPIREAT"])
async def test_a_torn_transaction_that_redis_replays_with_a_later_one_changes_no_token(
    tmp_path: Path, command: str
) -> None:
    """Redis loads a log that ends within a transaction without it, and once more is written behind it, with it."""
    async with Logged(tmp_path, "always") as logged:
        lease = await logged.run()
        log = logged.server.log_path.read_bytes()
        torn = log.rindex(command.encode()) + 4
        assert log.rindex(b"MULTI") < torn
        await logged.crash(torn)
        assert await held_tokens(logged.store, "s") == [1, 2, 3, 10, 11]
        await logged.store.commit(lease, a_round(2, 5, 12))
        await logged.store.commit(lease, a_round(3, 6, 13))
        await logged.crash(logged.server.log_size)
        record = await logged.store.load("s")
        assert record is not None
        assert (record.num_tokens, record.round_id) == (7, 4)
        assert await held_tokens(logged.store, "s") == [1, 2, 3, 10, 11, 12, 13]
