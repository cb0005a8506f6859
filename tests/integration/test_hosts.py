"""Names of hosts that ports without keys serve: a page whose name resolves to this machine must not call them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from gateway.auth import ApiKeys
from specdec.observability.series import ServiceSeries
from specdec.settings.addresses import host_rule
from specdec.settings.gateway import GatewaySettings
from tests.support.gateway_rig import RunningGateway, running_gateway
from tests.support.scraping import served

SERVED = ("localhost", "LocalHost", "localhost.", "app.localhost", "127.0.0.1", "127.8.9.1", "[::1]")
REFUSED = (
    "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil-localhost", "10.0.0.1", "0.0.0.0",
    "[::2]", "::1", "localhost@evil.example", "evil.example@localhost", "localhost,evil.example", "localhost/evil", "",
    "localhost:80:80", "[::1", "localhost:x", "loc alhost", "..", "[127.0.0.1].evil.example",
)  # fmt: skip
PATHS = ("/", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/v1/models", "/nothing")


async def status(running: RunningGateway, host: str | None, path: str = "/health", **options: Any) -> int:
    """Return the status of a request with a Host header as it is given; None for none, in HTTP/1.0."""
    version, lines = ("1.0", []) if host is None else ("1.1", [f"host: {host}"])
    return await status_of(running, path, version, [*lines, *options.get("lines", [])], options.get("method", "GET"))


async def status_of(running: RunningGateway, path: str, version: str, lines: list[str], method: str = "GET") -> int:
    reader, writer = await running.connect()
    head = "\r\n".join([f"{method} {path} HTTP/{version}", *lines, "connection: close", "", ""])
    writer.write(head.encode())
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return int(answer.split()[1])


async def test_a_keyless_gateway_on_loopback_serves_names_of_loopback_with_any_port() -> None:
    async with running_gateway() as running:
        for host in SERVED:
            for port in ("", ":8000", f":{running.port}"):
                assert await status(running, host + port) == 200, host + port
        for host in REFUSED:
            assert await status(running, host) == 403, host
            assert await status(running, f"{host}:8000") == 403, host
        assert await status(running, None) == 200


@pytest.mark.parametrize("path", PATHS)
async def test_every_path_and_method_refuses_another_name(path: str) -> None:
    async with running_gateway(cors_origin=("https://evil.example",)) as running:
        for method in ("GET", "HEAD", "OPTIONS", "POST", "DELETE"):
            lines = ["origin: https://evil.example", "access-control-request-method: POST", "content-length: 0"]
            assert await status(running, "evil.example", path, method=method, lines=lines) == 403, method


async def test_a_refusal_names_the_host_and_what_to_do() -> None:
    async with running_gateway() as running:
        answer = await running.http.get("/v1/models", headers={"host": "evil.example" * 100})
        assert answer.status_code == 403
        message = answer.json()["error"]["message"]
        assert "'evil.example" in message
        assert "--allowed-host NAME" in message
        assert len(message) < 300


async def test_two_hosts_and_a_target_with_a_host_are_judged_by_the_header() -> None:
    async with running_gateway() as running:
        assert await status_of(running, "/health", "1.1", ["host: localhost", "host: evil.example"]) in (400, 403)
        assert await status_of(running, "http://localhost/health", "1.1", ["host: evil.example"]) == 403


async def test_listed_names_are_served_without_the_port_and_others_are_not() -> None:
    async with running_gateway(allowed_host=("llm.example.com", "Box.")) as running:
        for host in ("llm.example.com", "LLM.example.com:443", "box", "box:8000", "localhost"):
            assert await status(running, host) == 200, host
        for host in ("example.com", "x.llm.example.com", "evil.example", "[::1"):
            assert await status(running, host) == 403, host


@pytest.mark.parametrize("name", ["", "https://llm.example.com", "a b", "*", "a/b"])
def test_a_listed_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"--allowed-host .*must be a host name"):
        GatewaySettings(coordinator=("127.0.0.1:1",), allowed_host=(name,))


async def test_with_keys_every_name_is_served_unless_requests_without_a_key_are() -> None:
    async with running_gateway(keys=ApiKeys(key="k" * 32, allow_anonymous=False)) as running:
        assert await status(running, "gateway.example") == 200
    async with running_gateway(keys=ApiKeys(key="k" * 32, allow_anonymous=True)) as running:
        assert await status(running, "gateway.example") == 403


def test_beyond_loopback_every_name_is_served_unless_names_are_listed() -> None:
    for address in ("0.0.0.0:8000", "[::]:8000", "192.0.2.1:8000"):
        assert host_rule(address)(["gateway.example"])
        assert not host_rule(address, ["llm.example.com"])(["gateway.example"])
        assert host_rule(address, ["llm.example.com"])(["llm.example.com"])


def test_a_metrics_port_on_loopback_serves_names_of_loopback() -> None:
    with served(ServiceSeries({"model_name": "m"}).registry) as endpoint:
        for host in SERVED:
            assert httpx2.get(f"http://{endpoint.address}/metrics", headers={"host": host}).status_code == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1:80"):
            assert httpx2.get(f"http://{endpoint.address}/metrics", headers={"host": host}).status_code == 403, host


async def test_a_page_of_another_site_cannot_send_a_simple_request() -> None:
    """A browser sends such a request without asking; its type is one that is not read as JSON."""
    async with running_gateway() as running:
        answer = await running.http.post(
            "/v1/completions", content=b'{"prompt": "a"}',
            headers={"origin": "https://evil.example", "content-type": "text/plain"},
        )  # fmt: skip
        assert answer.status_code in (400, 415)
        assert "access-control-allow-origin" not in answer.headers
