"""The endpoint of a client that is given none, and the clients as attributes of the package."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

import specdec
from specdec import AsyncClient, Client
from specdec.client.endpoints import resolve_endpoint
from specdec.contract.errors import InvalidRequest
from tests.support.scripted_coordinator import ScriptedCoordinator, serve


def test_a_client_without_an_endpoint_calls_the_one_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server, endpoint = serve(ScriptedCoordinator([]))
    monkeypatch.setenv("SPECDEC_ENDPOINT", endpoint)
    with Client() as client:
        assert client.tokenize("abc") == (3, 0)

    async def tokenize() -> tuple[int, ...]:
        async with AsyncClient() as client:
            return await client.tokenize("abc")

    assert asyncio.run(tokenize()) == (3, 0)
    server.stop(None)


@pytest.mark.parametrize("configured", [None, ""])
def test_without_an_endpoint_in_the_environment_a_client_calls_the_default_port(
    monkeypatch: pytest.MonkeyPatch, configured: str | None
) -> None:
    monkeypatch.delenv("SPECDEC_ENDPOINT", raising=False)
    if configured is not None:
        monkeypatch.setenv("SPECDEC_ENDPOINT", configured)
    assert resolve_endpoint(None) == "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("10.0.0.1:1,10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2"),
        ("[::1]:1, [fd00::2]:2", "ipv6:[::1]:1,[fd00::2]:2"),
        ("10.0.0.1:1,", "ipv4:10.0.0.1:1"),
    ],
)
def test_several_addresses_are_one_target(endpoint: str, target: str) -> None:
    assert resolve_endpoint(endpoint) == target


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("a:1,b:2", "must have IP addresses, got the name 'a'"),
        ("10.0.0.1:1,[::1]:2", "must not mix addresses"),
        ("10.0.0.1:1,10.0.0.2", "with a port"),
        (",", "must be HOST:PORT"),
    ],
)
def test_several_addresses_of_another_form_are_refused(endpoint: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        resolve_endpoint(endpoint)


def test_an_endpoint_that_is_given_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_ENDPOINT", "10.0.0.1:1")
    assert resolve_endpoint("127.0.0.1:2") == "127.0.0.1:2"


def test_the_error_about_an_endpoint_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_ENDPOINT", "localhost")
    with pytest.raises(InvalidRequest, match="SPECDEC_ENDPOINT: endpoint must be HOST:PORT"):
        Client()


def test_the_package_offers_both_clients_and_no_other_name() -> None:
    assert (specdec.Client, specdec.AsyncClient) == (Client, AsyncClient)
    package: Any = specdec
    with pytest.raises(AttributeError, match="no attribute 'Clients'"):
        _ = package.Clients


def test_importing_the_package_does_not_load_grpc() -> None:
    statement = "import specdec, sys; print('grpc' in sys.modules); specdec.Client; print('grpc' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False", "True"]
