"""Clients send their API key and tenant with every call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from specdec.client import AsyncClient, Client
from specdec.contract.errors import ClientClosed, InvalidRequest, SpecdecError
from specdec.settings.gateway import GatewaySettings
from specdec.settings.reading import parse_settings
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from tests.support.scripted_coordinator import ScriptedCoordinator, finished, started, tokens

METHODS = ["GetInfo", "Tokenize", "DeleteSession", "Promote", "Generate"]


class NotedMetadata(grpc.ServerInterceptor):
    """Notes the metadata of every call of the coordinator's service, by method."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, dict[str, str]]] = []

    def intercept_service(self, continuation: Callable[..., Any], details: grpc.HandlerCallDetails) -> Any:
        sent = {key: value for key, value in details.invocation_metadata if key in ("authorization", "specdec-tenant")}
        self.noted.append((details.method.rpartition("/")[2], sent))
        return continuation(details)


@pytest.fixture
def served() -> Iterator[tuple[NotedMetadata, str]]:
    interceptor = NotedMetadata()
    server = grpc.server(futures.ThreadPoolExecutor(4), interceptors=[interceptor])
    script = ScriptedCoordinator([lambda request: [started(request), tokens(0, [7]), finished(1)]])
    add_CoordinatorServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield interceptor, f"127.0.0.1:{port}"
    server.stop(None)


def call_all(client: Client) -> None:
    client.info()
    client.tokenize("text")
    client.delete_session("s")
    client.promote("pool")
    client.generate("p")


async def await_all(client: AsyncClient) -> None:
    await client.info()
    await client.tokenize("text")
    await client.delete_session("s")
    await client.promote("pool")
    await client.generate("p")


def blocking(endpoint: str, tenant: str | None, api_key: str | None) -> None:
    with Client(endpoint, api_key=api_key) as client:
        call_all(client if tenant is None else client.for_tenant(tenant))


def asynchronous(endpoint: str, tenant: str | None, api_key: str | None) -> None:
    async def call() -> None:
        async with AsyncClient(endpoint, api_key=api_key) as client:
            await await_all(client if tenant is None else client.for_tenant(tenant))

    asyncio.run(call())


@pytest.mark.parametrize("run", [blocking, asynchronous])
@pytest.mark.parametrize(
    ("tenant", "api_key", "sent"),
    [
        (None, None, {}),
        (None, "k-1", {"authorization": "Bearer k-1"}),
        ("acme", None, {"specdec-tenant": "acme"}),
        ("acme", "k-1", {"authorization": "Bearer k-1", "specdec-tenant": "acme"}),
    ],
)
def test_every_call_carries_the_key_and_the_tenant(
    served: tuple[NotedMetadata, str],
    run: Callable[[str, str | None, str | None], None],
    tenant: str | None,
    api_key: str | None,
    sent: dict[str, str],
) -> None:
    interceptor, endpoint = served
    run(endpoint, tenant, api_key)
    assert interceptor.noted == [(method, sent) for method in METHODS]


@pytest.mark.parametrize("api_key", ["", "two words", "line\nbreak", "schlüssel", "k" * 4097, b"bytes"])
def test_a_malformed_key_is_refused_without_being_shown(api_key: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^api_key must be 1 to 4096 printable ASCII characters") as refused:
        Client("127.0.0.1:1", api_key=api_key)
    assert refused.value.field == "api_key"
    assert not api_key or str(api_key) not in str(refused.value)


@pytest.mark.parametrize("api_key", ["two words", "schlüssel", "k" * 4097])
def test_a_gateway_refuses_a_key_that_no_client_can_send_without_showing_it(
    api_key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--coordinator", "127.0.0.1:1"]
    for by_environment in (False, True):
        if by_environment:
            monkeypatch.setenv("SPECDEC_GATEWAY__API_KEY", api_key)
        argv = flags if by_environment else [*flags, "--api-key", api_key]
        with pytest.raises(SystemExit) as ended:
            parse_settings(GatewaySettings, prog="gateway", argv=argv)
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "--api-key: must be 1 to 4096 printable ASCII characters without spaces" in line
        assert api_key not in line


def test_closing_a_tenants_client_leaves_the_connection_open_and_closing_the_client_ends_both(
    served: tuple[NotedMetadata, str],
) -> None:
    client = Client(served[1])
    with client.for_tenant("acme") as view:
        view.info()
    client.info()
    view.info()
    client.close()
    for call in (client.info, view.info, lambda: view.generate("p"), lambda: view.resume("s", 0)):
        with pytest.raises(ClientClosed):
            call()


async def test_an_async_clients_view_ends_with_the_client(served: tuple[NotedMetadata, str]) -> None:
    async with AsyncClient(served[1]) as client:
        async with client.for_tenant("acme") as view:
            await view.info()
        await view.info()
    for call in (view.info, lambda: view.generate("p")):
        with pytest.raises(SpecdecError) as refused:
            await call()
        assert isinstance(refused.value, ClientClosed)


def test_a_session_id_that_two_tenants_use_has_two_sizes(served: tuple[NotedMetadata, str]) -> None:
    with Client(served[1]) as client:
        views = [client.for_tenant(tenant) for tenant in ("acme", "acme", "other")]
        views[0].generate("p", session_id="s")
        expected = [
            view._sizes.add_expected_tokens(pb.GenerateRequest(session_id="s")).HasField("expected_session_tokens")
            for view in views
        ]
    assert expected == [True, False, False]


@pytest.mark.parametrize(
    ("endpoint", "is_local"),
    [
        ("127.0.0.1:1", True), ("127.8.8.8:1", True), ("localhost:1", True), ("[::1]:1", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:2", True), ("ipv6:[::1]:1", True), ("dns:///localhost:1", True),
        ("dns:localhost", True), ("unix:/run/specdec.sock", True),
        ("10.0.0.1:1", False), ("coordinator:1", False), ("[fe80::1]:1", False), ("localhost.example.org:1", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:2", False), ("dns://127.0.0.1/coordinator:1", False), ("xds:coordinator", False),
    ],
)  # fmt: skip
def test_a_key_leaves_this_machine_in_plaintext_only_if_the_caller_says_so(
    endpoint: str, is_local: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Client(endpoint).close()  # a call without a key may be in plaintext
    if is_local:
        Client(endpoint, api_key="k-1").close()
    else:
        with pytest.raises(InvalidRequest, match=r"not encrypted.*insecure=True") as refused:
            Client(endpoint, api_key="k-1")
        assert refused.value.field == "api_key"
        Client(endpoint, api_key="k-1", insecure=True).close()
        Client(endpoint, api_key="k-1", tls=True).close()
    assert [record.args for record in caplog.records if "plaintext" in record.message] == [(endpoint,)] * (not is_local)
