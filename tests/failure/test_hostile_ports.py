"""Hostile input at every port of a system: no process crashes, hangs, leaks, answers INTERNAL or stops serving.

First everything of one catalogue, at each port, while a stream runs; then thousands of random messages. Both are gRPC
calls, connections of raw HTTP/2 and HTTP, and frames on Unix sockets. Honest requests come between them and must get
the tokens of a quiet system. The full run sends 100,000 messages (`make test-failure`).
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx2
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from specdec.client import AsyncClient, Client
from specdec.rpc.unix_sockets import FrameReader, handshake, prefixed, socket_path
from specdec.v1 import common_pb2, draft_pb2_grpc, target_pb2_grpc
from tests.support.hostile.catalogue import PROPOSE, VERIFY, honest_messages
from tests.support.hostile.clients import HostileClients, Shot, attacks, shots
from tests.support.redis_fixture import RedisServer
from tests.support.scraping import Endpoint
from tests.support.stack import Stack, free_port
from tests.support.tiny_models import build_tiny_pair

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
NUM_AT_ONCE = 25
#: Messages of one run of Hypothesis, which remembers all its examples.
MESSAGES_PER_RUN = 10_000
#: Messages between two honest requests.
HONEST_INTERVAL = 1000
SETTLE_S = 120.0
#: Descriptors that a process may have more at the end than at its start: idle connections among the services.
SPARE_DESCRIPTORS = 20
#: Growth of a process over the second half of the messages. A leak of 1 KB for each message would be more.
MAX_GROWTH_BYTES = 24 << 20

#: An error or a traceback in a log, with the lines that follow it.
_ERROR = re.compile(r'(?:"level": "error"|Traceback)(?:.*\n?){1,12}')


PORTS = (
    "admin coordinator", "health coordinator", "grpc coordinator", "grpc draft", "grpc target", "http gateway",
    "metrics coordinator", "metrics draft", "metrics target", "socket draft", "socket target",
)  # fmt: skip


class System:
    """All services as processes on a real Redis, and the addresses of their ports."""

    def __init__(self, models: tuple[Path, Path], directory: Path) -> None:
        self.redis = RedisServer(directory)
        admin, health = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.stack = Stack(
            *models, redis_url=self.redis.url, gateway_arguments=[], has_metrics=True,
            coordinator_arguments=["--admin", admin, "--health", health],
        )  # fmt: skip
        self.ports = {"admin coordinator": admin, "health coordinator": health}
        self.text: tuple[int, ...] = ()
        """Greedy text of a quiet system, 100 tokens."""

    def start(self) -> None:
        self.redis.start()
        self.stack.__enter__()
        for name, part in self.stack.parts.items():
            self.ports[f"{'http' if name == 'gateway' else 'grpc'} {name}"] = part.address
            if name != "gateway":  # it has both at one port
                self.ports[f"metrics {name}"] = part.metrics
        for role, stub in (("draft", draft_pb2_grpc.DraftServiceStub), ("target", target_pb2_grpc.TargetServiceStub)):
            with grpc.insecure_channel(self.stack.parts[role].address) as channel:
                info: common_pb2.EngineInfo = stub(channel).GetEngineInfo(common_pb2.GetEngineInfoRequest())
            self.ports[f"socket {role}"] = info.lane

        with Client(self.stack.endpoint) as client:
            output = client.generate(prompt_token_ids=[5, 6, 7], max_new_tokens=100, temperature=0.0, ignore_eos=True)
        self.text = output.token_ids

    def stop(self) -> None:
        self.stack.stop()
        self.redis.stop()

    @property
    def processes(self) -> dict[str, int]:
        return {name: part.process.pid for name, part in self.stack.parts.items() if part.process is not None}

    def answers(self) -> tuple[tuple[int, ...], str]:
        """Return what honest clients get over gRPC and HTTP."""
        with Client(self.stack.endpoint) as client:
            output = client.generate(prompt_token_ids=[5, 6, 7], max_new_tokens=12, temperature=0.0, ignore_eos=True)
            client.delete_session(output.session_id)
        body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx2.post(f"http://{self.stack.parts['gateway'].address}/v1/completions", json=body, timeout=60.0)
        return output.token_ids, answer.json()["choices"][0]["text"]

    async def assert_serves(self, port: str) -> None:
        """Assert that a port answers an honest caller on a new connection."""
        kind, role = port.split()[:2]
        address = self.ports[port]
        if kind in ("http", "metrics"):
            async with httpx2.AsyncClient(timeout=60.0) as http:
                path = "health" if kind == "http" else "metrics"
                assert (await http.get(f"http://{address}/{path}")).status_code == 200
        elif kind == "socket":
            reader, writer = await asyncio.open_unix_connection(socket_path(address))
            writer.write(handshake("") + prefixed(honest_messages()[PROPOSE if role == "draft" else VERIFY][0]))
            frames, reading = [], FrameReader(64 << 20)
            while len(frames) < 2:  # the handshake and an answer
                received = await asyncio.wait_for(reader.read(1 << 16), 60.0)
                assert received, f"{port} closed the connection of an honest caller"
                frames += reading.frames(received)
            writer.close()
        else:
            own = (("grpc.use_local_subchannel_pool", 1),)  # a new connection
            async with grpc.aio.insecure_channel(address, options=own) as channel:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)

    def errors(self) -> list[str]:
        """Return the errors and tracebacks in the logs."""
        return [found for part in self.stack.parts.values() for found in _ERROR.findall(part.log)]

    def descriptors(self) -> dict[str, int]:
        return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in self.processes.items()}

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of each process."""
        pages = {name: Path(f"/proc/{pid}/statm").read_text().split()[1] for name, pid in self.processes.items()}
        return {name: int(number) * 4096 for name, number in pages.items()}

    def left(self, descriptors: dict[str, int]) -> list[str]:
        """Return what the messages have left behind: requests, leases, KV blocks, descriptors."""
        left = [f"{name} has {number} descriptors" for name, number in self.descriptors().items() if number >
                descriptors[name] + SPARE_DESCRIPTORS]  # fmt: skip
        for name, metric, labels in (
            ("coordinator", "num_requests_running", {}),
            ("target", "kv_blocks", {"state": "active"}),
            ("draft", "kv_blocks", {"state": "active"}),
        ):
            number = Endpoint(self.stack.parts[name].metrics).scrape_now().value(metric, **labels)
            left += [f"{name}: {metric} is {number}"] if number else []
        with redis.Redis.from_url(self.redis.url) as client:
            left += [f"{key!r} is held" for key in client.scan_iter("*:lease")]
        return left


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("models")
    system = System(build_tiny_pair("llama", folder, context=256, chat_template=TEMPLATE), tmp_path_factory.mktemp("r"))
    try:
        system.start()
        yield system
    finally:
        system.stop()


@pytest.mark.parametrize("port", PORTS)
async def test_everything_of_the_catalogue_is_answered_while_streams_go_on_and_the_port_serves_on(
    system: System, port: str
) -> None:
    clients, is_over = HostileClients(system.ports), asyncio.Event()
    async with AsyncClient(system.stack.endpoint) as client:

        async def stream() -> None:
            while not is_over.is_set():
                output = await client.generate(
                    prompt_token_ids=[5, 6, 7], max_new_tokens=100, temperature=0.0, ignore_eos=True
                )
                await client.delete_session(output.session_id)
                texts.add(output.token_ids)

        texts: set[tuple[int, ...]] = set()
        streaming = asyncio.create_task(stream())
        for name, shot, answers in attacks(port):
            outcome = await clients.send(shot)
            print(f"{name}: {outcome}")
            assert not clients.faults, name
            assert not answers or re.fullmatch(answers, outcome), (name, outcome)
            await system.assert_serves(port)
        is_over.set()
        await streaming
    await clients.close()
    assert texts == {system.text}
    assert sorted(system.ports) == sorted(PORTS)
    assert not system.errors(), "\n".join(system.errors()[:5])


def send_hostile(send: Callable[[list[Shot]], None], ports: list[str], num_messages: int) -> None:
    """Make hostile messages and send them in batches."""
    batches = st.lists(shots(honest_messages(), ports), min_size=NUM_AT_ONCE, max_size=NUM_AT_ONCE)
    run = settings(max_examples=num_messages // NUM_AT_ONCE, deadline=None, database=None, phases=[Phase.generate],
                   suppress_health_check=list(HealthCheck))  # fmt: skip
    run(given(batches)(send))()


@pytest.mark.parametrize(
    "num_messages",
    [
        pytest.param(2_000, marks=pytest.mark.timeout(900)),
        pytest.param(100_000, marks=[pytest.mark.full, pytest.mark.timeout(2700)]),
    ],
)
def test_hostile_messages_at_every_port_crash_hang_and_leak_nothing(system: System, num_messages: int) -> None:
    clients, loop = HostileClients(system.ports), asyncio.new_event_loop()
    expected, processes, descriptors = system.answers(), system.processes, system.descriptors()
    num_sent, memory = 0, system.memory()

    def send(batch: list[Shot]) -> None:
        nonlocal num_sent, memory
        loop.run_until_complete(clients.send_all(batch))
        assert not clients.faults, "\n".join(fault[:2000] for fault in clients.faults[:5])
        num_sent += len(batch)
        if num_sent % HONEST_INTERVAL < len(batch):
            assert system.answers() == expected
        if num_sent <= num_messages // 2:
            memory = system.memory()

    try:
        for _ in range(-(-num_messages // MESSAGES_PER_RUN)):
            send_hostile(send, list(system.ports), min(num_messages, MESSAGES_PER_RUN))
    finally:
        print(f"{num_sent} messages: {dict(sorted(clients.outcomes.items()))}")
        loop.run_until_complete(clients.close())
        loop.close()
    assert num_sent >= 0.9 * num_messages
    assert system.answers() == expected
    assert system.processes == processes
    assert all(part.is_alive for part in system.stack.parts.values())
    growth = {name: size - memory[name] for name, size in system.memory().items()}
    print(f"bytes that each process grew by over the second half: {growth}")
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth
    deadline_s = time.monotonic() + SETTLE_S
    while (left := system.left(descriptors)) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert not left
    assert not system.errors(), "\n".join(system.errors()[:5])
