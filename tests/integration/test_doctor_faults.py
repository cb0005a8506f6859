"""Faults that are planted into a running system, one at a time: `specdec doctor` names each; healthy systems are well.

Real processes on a real Redis: two simulated targets, a simulated draft, a coordinator and a gateway, which all faults
share. A fault is planted, the doctor looks, and the fault is taken back.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import signal
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from time import sleep, time

import pytest
import redis

from bench.systems.simulated import write_tokenizer
from specdec.cli.__main__ import run
from specdec.client import Client
from specdec.state.redis_store import open_registry
from specdec.state.store import ReplicaRecord
from tests.support.certificates import Authority
from tests.support.key_files import write_private
from tests.support.redis_fixture import RedisServer
from tests.support.releases import last_release, unpack
from tests.support.services import ROOT, Services
from tests.support.stack import is_ready, is_serving

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

MODEL = "simulated:8b-0.6b"
#: Checks of the machine that runs the tests; "redis" warns of answers that are slow there.
MACHINE_CHECKS = ("redis", "versions", "extras", "native kernels", "cache folder", "processors", "memory", "gpu")
NOWHERE = "127.0.0.1:1"
Findings = dict[str, list[tuple[str, str]]]


@dataclass
class System:
    """The running system, and where a fault can be planted."""

    server: RedisServer
    services: Services
    folder: Path
    tokenizer: str
    targets: list[str]
    coordinator: str
    gateway: str

    @property
    def flags(self) -> dict[str, str]:
        """Flags of the doctor for the healthy system."""
        return {"--endpoint": self.coordinator, "--redis-url": self.server.url, "--http": f"http://{self.gateway}"}

    @contextmanager
    def redis_set(self, **settings: str) -> Iterator[dict[str, str]]:
        """Change settings of Redis while the context is open."""
        with redis.Redis.from_url(self.server.url) as client:
            names = {name: name.replace("_", "-") for name in settings}
            before = {name: client.config_get(names[name])[names[name]] for name in settings}
            for name, value in settings.items():
                client.config_set(names[name], value)
            try:
                yield {}
            finally:
                for name, value in before.items():
                    client.config_set(names[name], value)

    @contextmanager
    def stopped(self, name: str) -> Iterator[dict[str, str]]:
        """Let a process hang while the context is open."""
        self.services.signal(name, signal.SIGSTOP)
        try:
            yield {}
        finally:
            self.services.signal(name, signal.SIGCONT)


def answers_http(address: str) -> bool:
    connection = HTTPConnection(address, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("system")
    server = RedisServer(folder, keeps_log=True)
    server.start()
    tokenizer = str(write_tokenizer(folder / "tokenizer"))
    with Services(ROOT, server.url, folder) as services:
        replica = ("--model", MODEL)
        targets = [services.begin("target_service", *replica, name=name) for name in ("target", "target2")]
        draft = services.begin("draft_service", *replica, name="draft")
        coordinator, gateway = services.begin("coordinator", "--tokenizer", tokenizer), services.begin("gateway")
        for name, address in zip(
            ("target", "target2", "draft", "coordinator"), (*targets, draft, coordinator), strict=True
        ):
            services.wait_for(name, address)
        services.wait_for("gateway", gateway, is_ready)
        yield System(server, services, folder, tokenizer, targets, coordinator, gateway)
    server.stop()


def doctor(capsys: pytest.CaptureFixture[str], flags: dict[str, str]) -> Findings:
    words = [word for flag, value in flags.items() for word in (flag, value)]
    run(["doctor", "--json", *words], {})
    found: Findings = {}
    for each in json.loads(capsys.readouterr().out)["checks"]:
        found.setdefault(each["check"], []).append((each["status"], each["found"]))
    return found


def problems(found: Findings) -> list[tuple[str, str, str]]:
    return [(name, *each) for name, several in found.items() for each in several if each[0] != "ok"]


Plant = Callable[[System], AbstractContextManager[dict[str, str]]]


@contextmanager
def read_only(system: System) -> Iterator[dict[str, str]]:
    with redis.Redis.from_url(system.server.url) as client:
        client.config_set("replica-read-only", "yes")
        client.replicaof("127.0.0.1", "1")
        try:
            yield {}
        finally:
            client.replicaof("NO", "ONE")


@contextmanager
def killed_draft(system: System) -> Iterator[dict[str, str]]:
    system.services.kill("draft")
    try:
        yield {}
    finally:
        system.services.start("draft_service", "--model", MODEL, name="draft")


@contextmanager
def started(system: System, module: str, *flags: str, services: Services | None = None) -> Iterator[str]:
    """Run one more process while the context is open; give its address."""
    services = services or system.services
    address = services.start(module, *flags, name="more", serves=answers_http if module == "gateway" else is_serving)
    try:
        yield address
    finally:
        services.end("more")


async def listed(system: System) -> set[str]:
    """Return the addresses of the replicas in the registry."""
    registry = open_registry(system.server.url)
    addresses = {record.address for role in ("target", "draft") for record in await registry.replicas(role)}
    await registry.close()
    return addresses


def wait_until_listed(system: System, address: str) -> None:
    """Return once a replica is in the registry, which may be after its health says SERVING."""
    while address not in asyncio.run(listed(system)):
        sleep(0.05)


@contextmanager
def gateway_without_coordinator(system: System) -> Iterator[dict[str, str]]:
    with started(system, "gateway", "--coordinator", NOWHERE, "--retry-s", "0.2") as address:
        yield {"--http": f"http://{address}"}


@contextmanager
def gateway_of_another_system(system: System) -> Iterator[dict[str, str]]:
    with Services(ROOT, "memory://", system.folder) as others:
        flags = ["--tokenizer", system.tokenizer, "--target-endpoint", system.targets[0]]
        coordinator = others.start("coordinator", *flags)
        with started(system, "gateway", "--coordinator", coordinator) as address:
            yield {"--http": f"http://{address}"}


@contextmanager
def gateway_with_another_key(system: System) -> Iterator[dict[str, str]]:
    with started(
        system, "gateway", "--coordinator", system.coordinator, "--api-key", "sk-theirs-0123456789"
    ) as address:
        yield {"--http": f"http://{address}", "--api-key": "sk-ours-0123456789"}


@contextmanager
def http_server(date_s: float = 0.0, pair: tuple[str, str] | None = None) -> Iterator[str]:
    """Answer HTTP on a port with a date that is `date_s` away, with a certificate if one is given."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        do_HEAD = do_GET  # noqa: N815

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time() + date_s, usegmt=True)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if pair is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*pair)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def certificate(days: float, trusted: str) -> Plant:
    """Return a gateway with a certificate that ends in `days`, which is checked with the authority `trusted`."""

    @contextmanager
    def plant(system: System) -> Iterator[dict[str, str]]:
        issuer, other = Authority(system.folder), Authority(system.folder, "other")
        pair = issuer.issue("gateway", days=days)
        authorities = {"own": issuer.path, "other": other.path}
        with http_server(pair=(pair.cert, pair.key)) as address:
            yield {"--http": f"https://{address}", "--tls-ca": authorities[trusted]}

    return plant


@contextmanager
def old_clock(system: System) -> Iterator[dict[str, str]]:
    with http_server(date_s=-300.0) as address:
        yield {"--metrics": address}


@contextmanager
def target_with_another_service_key(system: System) -> Iterator[dict[str, str]]:
    key = write_private(system.folder / "service.key", "k" * 32 + "\n")
    with started(system, "target_service", "--model", MODEL, "--service-key", str(key)) as address:
        wait_until_listed(system, address)
        yield {}


@contextmanager
def draft_of_the_last_release(system: System) -> Iterator[dict[str, str]]:
    sources = unpack(last_release(), system.folder / "release")
    with Services(sources, system.server.url, system.folder) as old:
        wait_until_listed(system, old.start("draft_service", "--model", MODEL))
        try:
            yield {}
        finally:
            old.end("draft_service")  # it leaves the registry; the record of a killed one would stay for a while


@contextmanager
def stale_record(system: System) -> Iterator[dict[str, str]]:
    async def change(publishes: bool) -> None:
        registry = open_registry(system.server.url)
        (record, *_) = await registry.replicas("draft")
        engine = type(record.engine)(**{**_fields(record.engine), "replica_id": "gone", "incarnation": "gone"})
        if publishes:
            await registry.publish(ReplicaRecord(NOWHERE, engine), ttl_s=80.0)
        else:
            await registry.remove("gone")
        await registry.close()

    asyncio.run(change(True))
    try:
        yield {}
    finally:
        asyncio.run(change(False))


def _fields(engine: object) -> dict[str, object]:
    return {name: getattr(engine, name) for name in type(engine).__dataclass_fields__}  # type: ignore[attr-defined]


@contextmanager
def drained_target(system: System) -> Iterator[dict[str, str]]:
    with Client(system.coordinator) as client:
        client.drain(system.targets[1])
        try:
            yield {}
        finally:
            client.drain(system.targets[1], undo=True)


@contextmanager
def full_queue(system: System) -> Iterator[dict[str, str]]:
    queue_of_one = ("--tokenizer", system.tokenizer, "--max-queue", "1")
    with started(system, "coordinator", *queue_of_one) as address, Client(address) as client:
        long = client.generate(prompt_token_ids=[1, 2], max_new_tokens=4096, ignore_eos=True, stream=True)
        next(iter(long))
        try:
            yield {"--endpoint": address}
        finally:
            long.close()


def flags(**given: str) -> Plant:
    """Return a fault of what the doctor, or an operator, names."""

    @contextmanager
    def plant(system: System) -> Iterator[dict[str, str]]:
        yield {f"--{name.replace('_', '-')}": value.format(url=system.server.url) for name, value in given.items()}

    return plant


#: Faults with the check that names each, and words of what it says.
FAULTS: dict[str, tuple[Plant, str, str]] = {
    "Redis is a read-only replica": (read_only, "redis writes", "read-only replica"),
    "Redis has no memory left": (lambda system: system.redis_set(maxmemory="1mb"), "redis writes", "memory is full"),
    "Redis lacks replicas": (lambda system: system.redis_set(min_replicas_to_write="1"), "redis writes", "NOREPLICAS"),
    "Redis evicts": (lambda system: system.redis_set(maxmemory_policy="allkeys-lru"), "redis eviction", "allkeys-lru"),
    "Redis writes nothing to disk": (lambda system: system.redis_set(appendonly="no"), "redis persistence", "nothing"),
    "Redis hangs": (lambda system: hung_redis(system), "redis", "not available"),
    "wrong password of Redis": (flags(redis_url="{url}?password=wrong"), "redis", "not available"),
    "services use another database": (flags(redis_url="{url}?db=1"), "registry", "another Redis, database"),
    "services use another cluster name": (flags(cluster="other"), "registry", "--cluster"),
    "a draft hangs": (lambda system: system.stopped("draft"), "replica or draft pools", "draft"),
    "a draft was killed": (killed_draft, "replica or draft pools", "draft"),
    "a target hangs": (lambda system: system.stopped("target2"), "replica", "target at"),
    "the coordinator hangs": (lambda system: system.stopped("coordinator"), "coordinator", ""),
    "the gateway hangs": (lambda system: system.stopped("gateway"), "gateway", "does not answer"),
    "a gateway without a coordinator": (gateway_without_coordinator, "gateway", "answers 503"),
    "a gateway of another system": (gateway_of_another_system, "gateway", "another system"),
    "a gateway that refuses the key": (gateway_with_another_key, "gateway", "answers 401"),
    "a gateway's certificate has expired": (certificate(-1, "own"), "gateway", "expired"),
    "the authority is another one": (certificate(30, "other"), "gateway", "certificate is refused"),
    "a clock is behind": (old_clock, "clock", "behind"),
    "a target has another service key": (target_with_another_service_key, "replica", "target at"),
    "a draft of the last release": (draft_of_the_last_release, "service versions", ""),
    "the registry lists a process that is gone": (stale_record, "replica", NOWHERE),
    "a target drains": (drained_target, "draining", "no new sessions"),
    "the queue is full": (full_queue, "round", "--max-queue"),
}  # fmt: skip


@contextmanager
def hung_redis(system: System) -> Iterator[dict[str, str]]:
    system.server.signal(signal.SIGSTOP)
    try:
        yield {}
    finally:
        system.server.signal(signal.SIGCONT)


def test_a_healthy_system_has_neither_failure_nor_warning(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    found = doctor(capsys, system.flags)
    assert not [each for each in problems(found) if each[0] not in MACHINE_CHECKS]
    for name in ("redis writes", "registry", "coordinator", "gateway", "service versions"):
        assert found[name], name
    assert len(found["round"]) == 3  # the replicas, the coordinator, the draft pool


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(system: System, capsys: pytest.CaptureFixture[str], name: str) -> None:
    plant, check, words = FAULTS[name]
    with plant(system) as changed:
        found = doctor(capsys, {**system.flags, **changed})
    named = [text for each in check.split(" or ") for status, text in found.get(each, ()) if status != "ok"]
    assert any(words in text for text in named), problems(found)


def test_the_system_is_healthy_again_after_all_faults(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    found = doctor(capsys, system.flags)
    assert not [each for each in problems(found) if each[0] not in MACHINE_CHECKS]
