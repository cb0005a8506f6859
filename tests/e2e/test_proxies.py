"""Proxies for web traffic see no link of the system; a client uses the proxy that SPECDEC_PROXY names."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.systems.simulated import write_tokenizer
from specdec.client import AsyncClient, Client
from specdec.contract.errors import InvalidRequest, SpecdecError
from specdec.observability.tracing import open_tracing
from tests.support.coordinator_rig import started_coordinator
from tests.support.trace_collector import TraceCollector
from tests.support.up_rig import specdec, start_up

VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
EXEMPTIONS = ("no_proxy", "no_grpc_proxy", "NO_PROXY")


class Proxy:
    """An HTTP proxy that tunnels to whatever it is told to reach, or to `upstream`, and notes what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.upstream = ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=self._tunnel, args=self._listener.accept()[:1], daemon=True).start()

    def _tunnel(self, client: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            request += client.recv(1 << 16)
        method, target, _ = request.split(b" ", 2)
        self.asked.append(f"{method.decode()} {target.decode()}")
        host, _, port = (self.upstream or target.decode()).rpartition(":")
        with socket.create_connection((host, int(port))) as server, client:
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=_copy, args=(server, client), daemon=True)
            back.start()
            _copy(client, server)
            back.join()


def _copy(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that the environment names for everything."""
    proxy = Proxy()
    for name in EXEMPTIONS:
        monkeypatch.delenv(name, raising=False)
    for name in VARIABLES:
        monkeypatch.setenv(name, f"http://{proxy.address}")
    yield proxy
    proxy.close()


async def test_links_between_services_and_of_clients_use_no_proxy(proxy: Proxy) -> None:
    async with started_coordinator() as (_, coordinator):
        port = coordinator.server.address.rpartition(":")[2]
        for endpoint in (f"127.0.0.1:{port}", f"localhost:{port}"):
            async with AsyncClient(endpoint) as client:
                assert (await client.generate(prompt_token_ids=[5, 6], max_new_tokens=2)).token_ids
        with Client("192.0.2.1:50051") as client, pytest.raises(SpecdecError):  # a machine that is not there
            client.generate(prompt_token_ids=[5, 6], timeout=1)
    assert proxy.asked == []


def test_traces_reach_a_collector_without_a_proxy(proxy: Proxy) -> None:
    with TraceCollector() as collector:
        tracing = open_tracing(collector.endpoint, 1.0, service="s", environ={})
        assert tracing is not None
        with tracing.begin("request", {}).active():
            pass
        tracing.close()
        assert [span.name for span in collector.spans] == ["request"]
    assert proxy.asked == []


def test_a_whole_system_and_its_commands_use_no_proxy(proxy: Proxy, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    environ = dict.fromkeys(VARIABLES, f"http://{proxy.address}")
    up, endpoint = start_up(
        "--target", "simulated:8b-0.6b", "--draft", "simulated:8b-0.6b", "--tokenizer", str(tmp_path), **environ
    )
    try:
        for words in (["status", "--endpoint", endpoint], ["health", endpoint]):
            done = specdec(*words, **environ)
            assert done.returncode == 0, done.stderr
        with Client(endpoint) as client:
            assert client.generate(prompt_token_ids=[5, 6], max_new_tokens=2).token_ids
    finally:
        up.send_signal(signal.SIGTERM)
        up.communicate()
    assert proxy.asked == []


async def test_a_client_connects_through_the_proxy_that_specdec_proxy_names(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the server is the proxy's to resolve; a server on this machine is still reached directly."""
    monkeypatch.setenv("SPECDEC_PROXY", f"http://{proxy.address}")
    async with started_coordinator() as (_, coordinator):
        proxy.upstream = coordinator.server.address
        for endpoint in ("coordinator.example:50051", coordinator.server.address):
            async with AsyncClient(endpoint) as client:
                assert (await client.generate(prompt_token_ids=[5, 6], max_new_tokens=2)).token_ids
    assert set(proxy.asked) == {"CONNECT coordinator.example:50051"}


@pytest.mark.parametrize(
    "named", ["proxy.example:3128", "https://proxy.example:3128", "http://u:secret@:1", "socks5://h:1"]
)
def test_a_proxy_that_cannot_be_used_is_refused_without_its_password(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_PROXY", named)
    with pytest.raises(InvalidRequest, match="SPECDEC_PROXY: the proxy must be named as http://HOST:PORT") as caught:
        Client("coordinator.example:50051")
    assert "secret" not in caught.value.message
    Client("127.0.0.1:50051").close()
