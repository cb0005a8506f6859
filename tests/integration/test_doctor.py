"""`specdec doctor` on a healthy system and on broken ones: real services, a real Redis, real certificates."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from specdec.access.callers import Callers
from specdec.access.guards import replica_guard
from specdec.access.service_key import ServiceKey
from specdec.cli.__main__ import run
from specdec.cli.checks.certificates import check_certificates
from specdec.cli.checks.comparisons import compare_versions, state_room
from specdec.cli.checks.finding import Check, Finding, Status, findings_of, ok
from specdec.cli.checks.ports import Port, check_ports, own_ports
from specdec.cli.checks.redis_checks import clock_finding
from specdec.cli.checks.redis_writes import check_writes
from specdec.cli.checks.system import System, SystemAddresses
from specdec.cli.request_flags import BUDGETS
from specdec.client import Client, ServerInfo
from specdec.contract.engine_api import EngineInfo
from specdec.rpc.service_server import TARGET_SERVICE, ServiceServer
from specdec.state.live_coordinators import coordinator_info
from specdec.state.redis_store import open_registry
from specdec.state.store import ReplicaRecord
from tests.support.certificates import Authority
from tests.support.coordinator_rig import Rig
from tests.support.redis_fixture import RedisServer
from tests.support.table_services import Service, start_service

NOWHERE = "127.0.0.1:1"
TTL_S = 600.0
SYSTEM_CHECKS = ("versions", "coordinator", "replicas", "vocabularies", "models", "service versions", "registry")
REDIS_CHECKS = (
    "redis writes",
    "redis role",
    "redis eviction",
    "redis memory",
    "redis persistence",
    "redis access",
    "clock",
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that is set as sessions need it."""
    server = RedisServer(tmp_path_factory.mktemp("healthy"), keeps_log=True)
    server.start()
    yield server
    server.stop()


def doctor(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """Return the exit code, and status and text of the findings by check."""
    code = run(["doctor", "--json", *flags], {})
    found: dict[str, list[tuple[str, str]]] = {}
    for each in json.loads(capsys.readouterr().out)["checks"]:
        found.setdefault(each["check"], []).append((each["status"], each["found"]))
        assert bool(each["advice"]) == (each["status"] != "ok")
    return code, found


def statuses(found: dict[str, list[tuple[str, str]]], name: str) -> list[str]:
    return [status for status, _ in found[name]]


async def publish(url: str, services: list[Service], *, at: str = "") -> None:
    """Publish records of services; `at`: address in place of their own."""
    registry = open_registry(url)
    for service in services:
        await registry.publish(ReplicaRecord(at or service.address, service.engine.info()), ttl_s=TTL_S)
    await registry.close()


async def test_a_healthy_system_has_no_failure_and_a_draft_of_another_vocabulary_and_a_dead_target_are_failures(
    store: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Rig(store_url=store.url) as rig:
        coordinator = await rig.coordinator()
        await publish(store.url, rig.services)
        flags = ("--endpoint", coordinator.server.address, "--redis-url", store.url)
        code, found = await asyncio.to_thread(doctor, capsys, *flags)
        assert code == 0, found
        for name in (*SYSTEM_CHECKS, *REDIS_CHECKS):
            assert statuses(found, name) == ["ok"], found[name]
        assert "2 of 2 answer: 1 target, 1 draft" in found["replicas"][0][1]
        assert statuses(found, "round") == ["ok"] * 3  # the replicas, the coordinator and the draft pool

        stranger = await start_service("draft", salt=7, pool="prose", vocabulary="another")
        lost = await start_service("target", salt=8)
        await lost.kill()
        await publish(store.url, [stranger])
        await publish(store.url, [lost], at=NOWHERE)
        code, found = await asyncio.to_thread(doctor, capsys, *flags)
        await stranger.kill()
    assert code == 1
    ((status, text),) = found["vocabularies"]
    assert status == "fail"
    assert f"draft-7 at {stranger.address} (pool prose)" in text
    ((status, text),) = found["replica"]
    assert status == "fail"
    assert NOWHERE in text


def test_a_redis_that_evicts_and_keeps_nothing_and_is_the_tier_as_well_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = RedisServer(tmp_path, arguments=["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"])
    server.start()
    try:
        code, found = doctor(capsys, "--endpoint", NOWHERE, "--redis-url", server.url, "--kv-tier-url", server.url)
    finally:
        server.stop()
    assert code == 1
    assert statuses(found, "redis eviction") == ["fail"]
    assert statuses(found, "redis persistence") == ["warn"]
    assert statuses(found, "kv tier eviction") == ["ok"]  # as a tier it would be right
    assert statuses(found, "kv tier") == ["fail"]
    assert "MB/s" in found["kv tier speed"][0][1]
    assert statuses(found, "coordinator") == ["fail"]


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [("maxmemory", "1mb", "memory is full"), ("min-replicas-to-write", "1", "NOREPLICAS"), ("", "", "")],
)
def test_a_redis_that_refuses_writes_is_found_by_writing(
    store: RedisServer, setting: str, value: str, words: str
) -> None:
    with redis.Redis.from_url(store.url) as client:
        if setting:
            client.config_set(setting, value)
        try:
            (finding,) = check_writes(store.url, "default")
        finally:
            client.config_set("maxmemory", 0)
            client.config_set("min-replicas-to-write", 0)
        assert not [key for key in client.scan_iter() if b"doctor" in key]
    assert finding.status == (Status.FAIL if setting else Status.OK)
    assert words in finding.found


def engine(role: str, version: str, build: str, *, num_states: int = 0) -> EngineInfo:
    info = coordinator_info(f"{role}-1", version=version, model="m", vocabulary_fingerprint="v", num_running=0)
    return replace(info, role=role, build=build, num_states=num_states)


@pytest.mark.parametrize(
    ("others", "status"),
    [
        ([("draft", "0.3.0", "a.d")], Status.OK),
        ([("draft", "0.3.0", "b.d")], Status.WARN),  # other sources of one version
        ([("target", "0.3.0", "a.u")], Status.WARN),  # other sources of one service
        ([("draft", "0.3.0", "")], Status.WARN),  # a commit before builds were stated
        ([("draft", "0.4.1", "b.d")], Status.WARN),
        ([("draft", "0.5.0", "b.d")], Status.FAIL),
        ([("draft", "1.3.0", "b.d")], Status.FAIL),
    ],
)
def test_services_are_compared_by_version_and_build(others: list[tuple[str, str, str]], status: Status) -> None:
    services = {"a:1": engine("target", "0.3.0", "a.t")}
    services |= {f"b:{index}": engine(*each) for index, each in enumerate(others)}
    assert [finding.status for finding in compare_versions(services)] == [status]


@pytest.mark.parametrize(("num_states", "statuses"), [(0, []), (7, [Status.WARN]), (8, [Status.OK])])
def test_slots_of_hybrids_are_compared_with_the_requests_that_run(num_states: int, statuses: list[Status]) -> None:
    info = ServerInfo("0.3.0", "m", "v", 24, 512, 8, (), max_running=4)
    engines = {"a:1": engine("target", "0.3.0", "a.t", num_states=num_states)}
    assert [finding.status for finding in state_room(info, engines)] == statuses


def test_bad_certificates_and_a_redis_that_is_away_fail_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    good, expired, strange = authority.issue("good", days=90), authority.issue("old", days=-1), other.issue("strange")
    cases = {
        (good.cert, good.key): {"tls certificate": "ok", "tls key": "ok", "tls issuer": "ok"},
        (expired.cert, expired.key): {"tls certificate": "fail", "tls issuer": None},
        (strange.cert, strange.key): {"tls certificate": "warn", "tls issuer": "fail"},
        (good.cert, expired.key): {"tls key": "fail"},
        (str(tmp_path / "absent"), good.key): {"tls key": "fail"},
    }
    for (cert, key), expected in cases.items():
        found = {each.check: each.status for each in check_certificates(cert, key, authority.path)}
        assert {name: found.get(name) for name in expected} == expected
    Path(good.key).chmod(0o644)
    tls = ("--tls-cert", good.cert, "--tls-key", good.key, "--tls-ca", authority.path)
    code, found_by_name = doctor(capsys, "--redis-url", "redis://127.0.0.1:1", *tls)
    assert code == 1
    assert statuses(found_by_name, "tls key") == statuses(found_by_name, "redis") == ["fail"]
    assert "mode 0644" in found_by_name["tls key"][0][1]


def test_without_a_system_at_the_default_endpoint_it_only_warns() -> None:
    def connect(endpoint: str, *, has_key: bool = True) -> Client:
        return Client(endpoint, budgets=BUDGETS)

    (finding,) = System(SystemAddresses(NOWHERE, False, connect)).check_coordinator()
    assert (finding.status, "nothing answers" in finding.found) == (Status.WARN, True)
    (finding,) = System(SystemAddresses(NOWHERE, True, connect)).check_coordinator()
    assert finding.status == Status.FAIL


def test_a_check_that_hangs_ends_at_its_limit_and_keeps_what_it_found() -> None:
    def hang() -> Iterator[Finding]:
        yield ok("first", "there")
        threading.Event().wait()

    first, second = findings_of(Check("slow", hang, limit_s=0.2))
    assert (first.check, second.check, second.status) == ("first", "slow", Status.FAIL)


async def test_a_port_that_others_reach_is_told_by_its_answer_to_tls(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("server", days=5)
    encrypted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    encrypted.load_cert_chain(pair.cert, pair.key)
    servers = [
        await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        for context in (None, encrypted)
    ]
    plain, secure = (f"0.0.0.0:{server.sockets[0].getsockname()[1]}" for server in servers)
    found = await asyncio.to_thread(lambda: list(check_ports([Port(plain, "coordinator"), Port(secure, "target")])))
    for server in servers:
        server.close()
    (about_plain,) = (each for each in found if plain in each.found)
    (about_certificate,) = (each for each in found if secure in each.found)
    assert (about_plain.check, about_plain.status) == ("open port", Status.WARN)
    # It ends in 5 days; about the port itself nothing is said.
    assert (about_certificate.check, about_certificate.status) == ("served certificate", Status.WARN)


def test_ports_of_our_processes_are_read_from_proc_and_those_of_others_are_not(tmp_path: Path) -> None:
    # As the kernel writes them: 0.0.0.0:50051 and [::]:50061 listen, 127.0.0.1:50071 is connected.
    head = "  sl  local_address rem_address   st tx_queue:rx_queue tr:tm->when retrnsmt   uid  timeout inode\n"
    tables = {
        "tcp": "0: 00000000:C383 00000000:0000 0A 0:0 0:0 0 0 0 11\n1: 0100007F:C397 0100007F:1 01 0:0 0:0 0 0 0 12\n",
        "tcp6": f"0: {'0' * 32}:C38D {'0' * 32}:0000 0A 0:0 0:0 0 0 0 13\n",
    }
    (tmp_path / "net").mkdir()
    for name, lines in tables.items():
        (tmp_path / "net" / name).write_text(head + lines)
    commands = {
        "7": ["python", "-P", "-m", "specdec.supervision.child", "coordinator", "--listen", "0.0.0.0:50051"],
        "8": ["python", "-m", "draft_service"],
        "9": ["python", "-m", "http.server"],
    }
    for (process, words), inode in zip(commands.items(), (11, 13, 11), strict=True):
        (tmp_path / process / "fd").mkdir(parents=True)
        (tmp_path / process / "cmdline").write_text("\0".join(words) + "\0")
        (tmp_path / process / "fd" / "5").symlink_to(f"socket:[{inode}]")
    assert {port.address: port.owner for port in own_ports(tmp_path)} == {
        "0.0.0.0:50051": "coordinator, process 7",
        "[::]:50061": "draft_service, process 8",
    }


@pytest.mark.parametrize(("skew_s", "status"), [(0.1, Status.OK), (-5.0, Status.WARN), (90.0, Status.FAIL)])
def test_clocks_that_differ_by_seconds_are_a_warning_and_by_a_minute_a_failure(skew_s: float, status: Status) -> None:
    assert clock_finding("Redis is", skew_s, uncertain_s=0.01).status == status


async def test_replicas_that_answer_services_alone_are_alive_and_open_services_beyond_this_machine_are_named() -> None:
    guard = replica_guard(Callers(service_key=ServiceKey("k" * 16)))
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        server = ServiceServer("127.0.0.1:0", service_names=(TARGET_SERVICE,), check_caller=guard.check)
        rig.target.servicer.add_to(server.grpc_server)
        await server.start()

        def connect(endpoint: str, *, has_key: bool = True) -> Client:
            return Client(endpoint, budgets=BUDGETS)

        beyond = rig.draft.address.replace("127.0.0.1", "0.0.0.0")  # as an address of a network
        static = [("target", server.address), ("draft", beyond)]
        system = System(SystemAddresses(coordinator.server.address, True, connect, static=static))
        checks = (system.check_coordinator, system.check_replicas)
        found = await asyncio.to_thread(lambda: {each.check: each for check in checks for each in check()})
        await server.stop(0)
    assert found["replicas"].status == Status.OK
    assert found["replicas"].found == "4 of 4 answer: 2 target, 2 draft, 1 of them services alone"
    assert (found["callers"].status, found["callers"].found) == (
        Status.WARN,
        f"callers without a key are answered by draft at {beyond}",
    )
