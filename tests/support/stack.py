"""A whole system as real processes: draft, target, coordinator and gateway services on free loopback ports.

    with Stack(target_model, draft_model) as stack:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(grpc.insecure_channel(stack.endpoint))
        stack.kill("draft")
        stack.restart("draft")

Each part runs `python -m SERVICE` with one OpenMP thread. It is forked from a template that has imported its packages
(`process_template`); on a machine or under a clock of its own it is a process from the start. `start` waits for health,
`stop` ends everything and checks nothing. Called by tests that need processes; tests that do not should use
`tests.support.coordinator_rig`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.supervision.processes import free_ports
from specdec.v1.coordinator_pb2 import GetInfoRequest
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.support.machines import Machines
from tests.support.process_template import ENVIRON, ForkedProcess, Streams, start_like, start_process
from tests.support.stepped_clocks import SteppedClock

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1
GATEWAY = "gateway"


#: Ports that this process has given out: some of them are listened on only later.
_GIVEN: set[int] = set()
_NUM_SHARES = 8
#: Test workers give out ports of different shares.
_SHARE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _NUM_SHARES


def free_port() -> int:
    """Return a free loopback TCP port that this test run has not given out before."""
    while True:
        (port,) = free_ports(1)
        if port % _NUM_SHARES == _SHARE and port not in _GIVEN:
            _GIVEN.add(port)
            return port


Dial = Callable[[str], grpc.Channel]
"""Returns a channel to an address."""


def is_serving(address: str, dial: Dial = grpc.insecure_channel, timeout_s: float = 1.0) -> bool:
    """Return whether `grpc.health.v1` at `address` says SERVING within `timeout_s`.

    The default suits a caller that asks again. One that asks once allows for a busy machine: `START_TIMEOUT_S`.
    """
    with dial(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def is_ready(address: str) -> bool:
    """Return whether the gateway at `address` reaches a coordinator that has a target."""
    connection = HTTPConnection(address, timeout=5.0)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def num_connected(address: str, dial: Dial = grpc.insecure_channel) -> int:
    """Replicas that the coordinator at `address` is connected to; 0 when it does not answer."""
    with dial(address) as channel:
        try:
            served = CoordinatorServiceStub(channel).GetInfo(GetInfoRequest(), timeout=1.0)
        except grpc.RpcError:
            return 0
        return sum(len(pool.replicas) for pool in served.pools)


@dataclass
class Part:
    """One process of the stack. Its name is its service, with a number from the second on: target, target2."""

    name: str
    module: str
    arguments: Sequence[str]
    address: str
    log_path: Path
    machine: Sequence[str] = ()
    """What its command begins with, where it runs on a machine or under a clock of its own."""
    metrics: str = ""
    """HOST:PORT of its metrics; "" for none."""
    dial: Dial = grpc.insecure_channel
    process: subprocess.Popen[bytes] | ForkedProcess | None = field(default=None, repr=False)

    def start(self, environ: Mapping[str, str]) -> None:
        with open(os.devnull, "rb") as nothing, self.log_path.open("ab") as log:
            streams = Streams(nothing, log, log)
            if self.machine:
                command = [*self.machine, sys.executable, "-m", self.module, *self.arguments]
                self.process = start_process(command, environ, streams)
            else:
                self.process = start_like(self.module, self.arguments, environ, streams)

    @property
    def is_serving(self) -> bool:
        return is_ready(self.address) if self.module == GATEWAY else is_serving(self.address, self.dial)

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> str:
        """What it wrote to stdout and stderr so far, all its lives together."""
        return self.log_path.read_text(errors="replace")

    def end(self, number: int) -> int:
        """Sends a signal and waits for the end; returns the exit code."""
        assert self.process is not None, f"{self.name} was never started"
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"{self.name} ignored signal {number}:\n{self.log}") from None
        return int(self.process.returncode)


class Stack:
    """Draft, target, coordinator and gateway processes, and a Redis of their own unless told otherwise."""

    def __init__(
        self,
        target: Path | str,
        draft: Path | str | None = None,
        *,
        num_targets: int = 1,
        num_drafts: int = 1,
        num_coordinators: int = 1,
        num_gateways: int = 1,
        tokenizer: Path | str | None = None,
        redis_url: str = "memory://",
        replica_arguments: Sequence[str] = ("--dtype", "float32"),
        target_arguments: Sequence[str] = (),
        draft_arguments: Sequence[str] = (),
        coordinator_arguments: Sequence[str] = (),
        gateway_arguments: Sequence[str] | None = None,
        has_metrics: bool = False,
        environ: Mapping[str, str] | None = None,
        machines: Machines | None = None,
        clocks: Mapping[str, SteppedClock] | None = None,
        dial: Dial = grpc.insecure_channel,
    ) -> None:
        """
        Args:
            target: model directory of the target, or any model name that the services take.
            draft: model directory of the draft; None: no draft service.
            num_targets: target processes; they are called target, target2, ...
            num_drafts: draft processes, likewise.
            num_coordinators: coordinator processes, likewise; more than one needs a Redis.
            num_gateways: gateway processes, likewise.
            tokenizer: its directory; None: the target's.
            redis_url: of the session store. Replicas are static endpoints either way.
            replica_arguments: further arguments of draft and target.
            target_arguments: further arguments of targets.
            draft_arguments: further arguments of drafts.
            coordinator_arguments: further arguments of coordinators.
            gateway_arguments: further arguments of gateways in front of all coordinators; None: no gateway.
            has_metrics: whether every part serves metrics, the gateway at its own address.
            environ: added to the environment of every process.
            machines: one for each part, under its name; None: all parts run here.
            clocks: wall clocks of single parts by their names; the others have the machine's.
            dial: makes the channels on which parts are asked whether they serve.
        """
        self._directory = tempfile.TemporaryDirectory(prefix="specdec-stack-")
        self._environ = {**os.environ, **ENVIRON, **(environ or {})}
        self._machines, self._clocks, self._dial = machines, clocks or {}, dial
        self._has_metrics = has_metrics
        self.parts: dict[str, Part] = {}
        endpoints: list[str] = []
        for role, model, count in (("target", target, num_targets), ("draft", draft, num_drafts if draft else 0)):
            for index in range(count):
                arguments = ["--model", str(model), "--device", "cpu", *replica_arguments, "--redis-url", "memory://"]
                arguments += draft_arguments if role == "draft" else target_arguments
                part = self._add(role, index, f"{role}_service", arguments)
                endpoints += [f"--{role}-endpoint", part.address]
        for index in range(num_coordinators):
            arguments = ["--tokenizer", str(tokenizer or target), "--redis-url", redis_url, *endpoints]
            self._add("coordinator", index, "coordinator", [*arguments, *coordinator_arguments])
        if gateway_arguments is not None:
            upstream = [word for part in self._coordinators() for word in ("--coordinator", part.address)]
            for index in range(num_gateways):
                self._add(GATEWAY, index, GATEWAY, [*upstream, "--redis-url", "memory://", *gateway_arguments])

    def _add(self, role: str, index: int, module: str, arguments: Sequence[str]) -> Part:
        name = role if index == 0 else f"{role}{index + 1}"
        machine, address = [], f"127.0.0.1:{free_port()}"
        if self._machines is not None:
            machine, address = self._machines.command(name), f"{self._machines.address(name)}:50051"
            arguments = [*arguments, "--insecure"]
        if name in self._clocks:
            machine = [*machine, *self._clocks[name].command]
        metrics = ""
        if self._has_metrics:
            metrics = address if module == GATEWAY else f"127.0.0.1:{free_port()}"
            arguments = [*arguments, *(() if module == GATEWAY else ("--metrics", metrics))]
        log_path = Path(self._directory.name) / f"{name}.log"
        command = [*arguments, "--listen", address]
        self.parts[name] = Part(name, module, command, address, log_path, machine, metrics, self._dial)
        return self.parts[name]

    @property
    def endpoint(self) -> str:
        """HOST:PORT of the first coordinator."""
        return self.parts["coordinator"].address

    def __enter__(self) -> Self:
        try:
            for part in self.parts.values():
                part.start(self._environ)
            for part in self.parts.values():
                self.wait_serving(part.name)
            self._wait_connected()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_serving(self, name: str) -> None:
        """Waits until a part's health says SERVING. Raises AssertionError, with its log, when it ends instead."""
        part = self.parts[name]
        self._wait(part, lambda: part.is_serving)

    def _wait_connected(self) -> None:
        """Waits until every coordinator is connected to every replica."""
        num_replicas = sum(part.module.endswith("_service") for part in self.parts.values())
        for part in self._coordinators():
            self._wait(part, lambda address=part.address: num_connected(address, self._dial) == num_replicas)

    def _coordinators(self) -> list[Part]:
        return [part for part in self.parts.values() if part.module == "coordinator"]

    def _wait(self, part: Part, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if not part.is_alive or time.monotonic() > deadline:
                raise AssertionError(f"{part.name} does not serve:\n{part.log}")
            time.sleep(_POLL_S)

    def kill(self, name: str) -> None:
        """Ends a part at once, as a crash would."""
        self.parts[name].end(signal.SIGKILL)

    def terminate(self, name: str) -> int:
        """Asks a part to drain and end; returns its exit code."""
        return self.parts[name].end(signal.SIGTERM)

    def restart(self, name: str) -> None:
        """Starts an ended part again at the same address and waits for its health."""
        self.parts[name].start(self._environ)
        self.wait_serving(name)

    def stop(self) -> None:
        """Ends every process that is left and forgets the logs. Idempotent."""
        for part in self.parts.values():
            if part.is_alive and part.process is not None:
                part.process.send_signal(signal.SIGTERM)
        for part in self.parts.values():
            if part.process is None:
                continue
            with contextlib.suppress(subprocess.TimeoutExpired):
                part.process.wait(STOP_TIMEOUT_S)
            part.process.kill()
            part.process.wait()
        self._directory.cleanup()
