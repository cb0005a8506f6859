"""Transport security of real processes: draft, target and coordinator with mutual TLS, clients, gateway and renewal."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest

from bench.systems.simulated import write_tokenizer
from specdec import AsyncClient, Client, Tls
from specdec.cli.__main__ import run
from specdec.client import Budgets
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import InvalidRequest, Unavailable, Unsupported
from specdec.rpc.client import DraftLink, TargetLink, open_link
from specdec.rpc.health import Health
from specdec.rpc.service_server import TARGET_SERVICE, ServiceServer
from tests.support.certificates import Authority, Pair
from tests.support.gateway_rig import running_gateway
from tests.support.stack import Stack, free_port, is_serving
from tests.support.up_rig import ENVIRON, SPECDEC

PAIR = "simulated:8b-0.6b,predraft=off"
IMPATIENT = Budgets(connect_s=0.0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.issue("service")


@pytest.fixture(scope="module")
def front(authority: Authority) -> Pair:
    """The coordinator's certificate, which one test renews."""
    return authority.issue("coordinator")


@pytest.fixture(scope="module")
def system(authority: Authority, pair: Pair, front: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Draft, target and coordinator that trust one authority."""
    with Stack(
        PAIR,
        PAIR,
        tokenizer=write_tokenizer(tmp_path_factory.mktemp("tokenizer")),
        replica_arguments=flags(authority, pair),
        coordinator_arguments=flags(authority, front),
        dial=lambda address: grpc.secure_channel(address, credentials(authority, pair)),
    ) as stack:
        yield stack


def flags(authority: Authority, pair: Pair) -> list[str]:
    return ["--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-ca", authority.path]


def credentials(authority: Authority, pair: Pair | None = None) -> grpc.ChannelCredentials:
    """gRPC's own credentials, which take certificates that `Tls` refuses."""
    own = (None, None) if pair is None else (Path(pair.key).read_bytes(), Path(pair.cert).read_bytes())
    return grpc.ssl_channel_credentials(Path(authority.path).read_bytes(), *own)


def refused(endpoint: str, tls: Tls | bool) -> str:
    """The message with which a client's first call fails."""
    with Client(endpoint, budgets=IMPATIENT, tls=tls) as client, pytest.raises(Unavailable) as caught:
        client.info()
    assert caught.value.reason == "COORDINATOR_UNAVAILABLE"
    return caught.value.message


async def test_both_clients_generate_over_tls_with_drafts_behind_mutual_tls(
    system: Stack, authority: Authority
) -> None:
    tls = Tls(ca=authority.path)
    with Client(system.endpoint, tls=tls) as client:
        completion = client.generate(prompt_token_ids=[1, 2, 3], max_new_tokens=24, seed=1, ignore_eos=True)
    assert completion.stats.num_draft_tokens > 0
    async with AsyncClient(system.endpoint, tls=tls) as client:
        again = await client.generate(prompt_token_ids=[1, 2, 3], max_new_tokens=24, seed=1, ignore_eos=True)
    assert len(again.token_ids) == len(completion.token_ids) == 24


def test_a_client_reads_its_files_from_the_environment(
    system: Stack, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_TLS_CA", authority.path)
    with Client(system.endpoint) as client:
        assert client.info().version
    monkeypatch.setenv("SPECDEC_TLS_CERT", "/nowhere.pem")
    with pytest.raises(InvalidRequest, match="tls_key"):
        Client(system.endpoint)


def test_a_client_of_the_other_kind_is_told_so(system: Stack, authority: Authority) -> None:
    assert "as a port with TLS does, and this side uses none" in refused(system.endpoint, False)
    plaintext = grpc.server(ThreadPoolExecutor(1))
    port = plaintext.add_insecure_port("127.0.0.1:0")
    plaintext.start()
    assert "it answers in plaintext" in refused(f"127.0.0.1:{port}", Tls(ca=authority.path))
    plaintext.stop(None)


def test_a_client_refuses_certificates_that_are_expired_foreign_or_of_another_host(
    authority: Authority, tmp_path: Path
) -> None:
    tls = Tls(ca=authority.path)
    expected = {
        authority.issue("expired", days=-1): "its certificate has expired",
        Authority(tmp_path, "other").issue("foreign"): "not signed by a trusted authority",
        authority.issue("elsewhere", "replica.example"): "its certificate is for another host",
    }
    for own, words in expected.items():
        server = grpc.server(ThreadPoolExecutor(1))
        key_and_chain = (Path(own.key).read_bytes(), Path(own.cert).read_bytes())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([key_and_chain]))
        server.start()
        assert words in refused(f"127.0.0.1:{port}", tls)
        if "another host" in words:  # and the name that it has is accepted: the server has no such method
            named = Tls(ca=authority.path, server_name="replica.example")
            with Client(f"127.0.0.1:{port}", tls=named) as client, pytest.raises(Unsupported):
                client.info()
        server.stop(None)


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_replica_accepts_clients_of_its_authority_alone(
    system: Stack, authority: Authority, pair: Pair, tmp_path: Path, role: str
) -> None:
    foreign = Authority(tmp_path, "other").issue("foreign")
    address = system.parts[role].address

    def answers(own: Pair | None) -> bool:
        return is_serving(address, lambda at: grpc.secure_channel(at, credentials(authority, own)))

    assert answers(pair)
    assert not answers(None)
    assert not answers(foreign)
    assert not answers(authority.issue("late", days=-1))
    assert not is_serving(address)


async def test_a_link_says_that_the_replica_demands_another_certificate(system: Stack, authority: Authority) -> None:
    link = open_link("target", system.parts["target"].address, tls=Tls(ca=authority.path))
    with pytest.raises(Unavailable, match="as it does if it demands a certificate"):
        await link.info()
    await link.close()


def test_commands_take_the_files_as_flags(
    system: Stack, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--endpoint", system.endpoint]
    assert run(["status", "--json", *at, "--tls-ca", authority.path], {}) == 0
    assert len(json.loads(capsys.readouterr().out)["pools"]) == 2
    assert run(["status", *at], {"SPECDEC_TLS_CA": authority.path}) == 0
    assert run(["health", system.endpoint, "--tls-ca", authority.path], {}) == 0
    capsys.readouterr()
    assert run(["status", *at, "--tls-ca", "/nowhere.pem"], {}) == 2
    assert (
        capsys.readouterr().err == "error: --tls-ca: cannot read /nowhere.pem: No such file or directory "
        "(INVALID_REQUEST)\n"
    )
    assert run(["health", system.endpoint], {}) == 1
    assert "as a port with TLS does" in capsys.readouterr().err


async def test_a_gateway_serves_https_and_calls_its_coordinator_over_tls(
    system: Stack, authority: Authority, pair: Pair
) -> None:
    files = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_ca": authority.path}
    async with running_gateway(system.endpoint, trusted=authority.path, **files) as running:
        assert (await running.http.get("/ready")).status_code == 200
        answer = await running.http.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        before = await asyncio.to_thread(served_certificate, running.port)
        authority.issue("service")
        assert await asyncio.to_thread(served_certificate, running.port) != before
        assert (await running.http.get("/ready")).status_code == 200


def test_a_renewed_certificate_is_used_without_a_restart(
    system: Stack, authority: Authority, front: Pair, tmp_path: Path
) -> None:
    port = int(system.endpoint.rpartition(":")[2])
    before = served_certificate(port)
    key = Path(front.key).read_bytes()
    Path(front.key).write_bytes(b"not a key")
    assert served_certificate(port) == before
    Path(front.key).write_bytes(key)
    authority.issue("coordinator")
    assert served_certificate(port) != before
    with Client(system.endpoint, tls=Tls(ca=authority.path)) as client:
        assert client.info().pools
    log = system.parts["coordinator"].log
    assert "new certificate refused" in log
    assert "certificate reloaded" in log


async def test_clients_and_links_that_are_refused_use_the_files_of_today(tmp_path: Path) -> None:
    """A new authority issues the server's certificate; the connection of before was made with the old one."""
    address = f"127.0.0.1:{free_port()}"
    link, client = None, None
    for _ in range(2):
        authority = Authority(tmp_path)
        own = authority.issue("server")
        tls = Tls(ca=authority.path, cert=own.cert, key=own.key)
        server = ServiceServer(address, service_names=(TARGET_SERVICE,), tls=tls, demands_client_certificate=True)
        await server.start()
        client, link = client or AsyncClient(address, tls=tls), link or open_link("target", address, tls=tls)
        with pytest.raises(Unsupported):  # it is answered: the server has no service
            await client.info()
        with pytest.raises(Unsupported):
            await described(link)
        await server.stop(0)
    assert client is not None
    assert link is not None
    await client.close()
    await link.close()


async def described(link: DraftLink | TargetLink) -> EngineInfo:
    """What a replica says of itself, as soon as it can be reached."""
    while True:
        try:
            return await link.info()
        except Unavailable:
            await asyncio.sleep(0.05)


def test_an_endpoint_of_several_coordinators_needs_the_name_of_their_certificates(
    system: Stack, authority: Authority
) -> None:
    several = f"ipv4:{system.endpoint},{system.endpoint}"
    assert "for another host" in refused(several, Tls(ca=authority.path))
    with Client(several, tls=Tls(ca=authority.path, server_name="localhost")) as client:
        assert client.info().pools


def test_operator_calls_are_encrypted_as_the_public_port_is(
    system: Stack, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(system.endpoint, tls=Tls(ca=authority.path)) as client:
        admin = client.info().admin_address
    assert "as a port with TLS does" in refused(admin, False)
    words = ["promote", "default", "--endpoint", system.endpoint, "--admin", admin, "--tls-ca", authority.path]
    assert run(words, {}) == 1
    assert "it runs without --route auto" in capsys.readouterr().err  # which the coordinator says


async def test_a_health_port_stays_plaintext(authority: Authority, pair: Pair) -> None:
    tls = Tls(ca=authority.path, cert=pair.cert, key=pair.key)
    address, health = f"127.0.0.1:{free_port()}", Health((TARGET_SERVICE,))
    health.open_port(address)
    server = ServiceServer("127.0.0.1:0", health=health, tls=tls, demands_client_certificate=True)
    await server.start()
    await server.set_serving()
    assert await asyncio.to_thread(is_serving, address)
    assert not await asyncio.to_thread(is_serving, server.address)
    await server.stop(0)


@pytest.mark.full
def test_up_serves_grpc_and_http_with_its_certificate_and_connects_to_replicas_with_it(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    command = [*SPECDEC, "up", "--json", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--device", "cpu"]
    command += ["--target", PAIR, "--draft", PAIR, "--tokenizer", str(write_tokenizer(tmp_path))]
    up = subprocess.Popen([*command, *flags(authority, pair)], stdout=subprocess.PIPE, text=True, env=ENVIRON)
    try:
        assert up.stdout is not None
        ready = json.loads(up.stdout.readline())
        with Client(ready["grpc"], tls=Tls(ca=authority.path)) as client:
            completion = client.generate(prompt_token_ids=[1, 2], max_new_tokens=12, ignore_eos=True)
        assert completion.stats.num_draft_tokens > 0
        assert "as a port with TLS does" in refused(ready["grpc"], False)
        trusting = ssl.create_default_context(cafile=authority.path)
        with urlopen(f"https://{ready['http']}/ready", context=trusting) as answer:
            assert answer.status == 200
    finally:
        up.terminate()
        up.communicate()
    assert up.returncode == 0


def served_certificate(port: int) -> str:
    """The certificate that a server of this machine shows, unverified."""
    return ssl.get_server_certificate(("127.0.0.1", port))
