"""`specdec up --http`: where the gateway listens, what is refused before anything starts, and what the gateway gets."""

from __future__ import annotations

import argparse
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from specdec.cli import Usage, up, up_flags
from specdec.cli.__main__ import build_parser
from specdec.cli.extras import missing_extra
from specdec.cli.launching import Launcher, secured
from specdec.cli.listening import http_address, listen_address, metrics_addresses
from specdec.contract.errors import Unavailable


def parsed(*words: str) -> argparse.Namespace:
    return build_parser({}).parse_args(list(words))


@pytest.fixture
def taken() -> Iterator[str]:
    """An address at which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_up_has_no_gateway_unless_asked_and_serve_has_one_unless_refused() -> None:
    assert http_address(parsed("up"), {}) == ""
    assert http_address(parsed("serve", "m", "--http", "none"), {}) == ""
    assert http_address(parsed("up", "--http", "127.0.0.1:0"), {}).startswith("127.0.0.1:")


def test_a_given_address_that_is_taken_is_an_error_and_the_default_moves_with_a_note(
    taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Unavailable, match="choose another address with --http") as refused:
        http_address(parsed("up", "--http", taken), {})
    assert refused.value.reason == "ADDRESS_IN_USE"
    args = parsed("serve", "m")
    args.default_http = taken
    moved = http_address(args, {})
    assert moved != taken
    assert f"note: {taken} is in use, so HTTP is served at {moved}" in capsys.readouterr().err


@pytest.mark.parametrize("access", [("--api-key", "k"), ("--api-keys", "f"), ("--set", "gateway.allow_anonymous=true")])
def test_an_address_that_other_machines_reach_needs_keys_or_a_word(access: tuple[str, str]) -> None:
    with pytest.raises(Usage, match="give --api-keys or --api-key"):
        http_address(parsed("up", "--http", "0.0.0.0:0", "--insecure"), {})
    assert http_address(parsed("up", "--http", "0.0.0.0:0", "--insecure", *access), {})


@pytest.mark.parametrize("find", [http_address, listen_address])
def test_an_address_that_other_machines_reach_needs_a_certificate_or_a_word(find: Callable[..., str]) -> None:
    flags = ["up", "--http", "0.0.0.0:0", "--listen", "0.0.0.0:0", "--api-key", "k"]
    with pytest.raises(Usage, match=r"0\.0:\d+ is reached from other machines: give --tls-cert and --tls-key, or"):
        find(parsed(*flags), {})
    for given in (["--insecure"], ["--tls-cert", "cert.pem"]):
        assert find(parsed(*flags, *given), {}).startswith("0.0.0.0:")
    service = "COORDINATOR" if find is listen_address else "GATEWAY"
    assert find(parsed(*flags), {f"SPECDEC_{service}__TLS_CERT": "cert.pem"}).startswith("0.0.0.0:")


@pytest.mark.parametrize("variable", ["SPECDEC_GATEWAY__API_KEY", "SPECDEC_GATEWAY__API_KEYS"])
def test_keys_of_the_gateway_may_be_in_the_environment_alone(variable: str) -> None:
    args, environ = parsed("up", "--http", "0.0.0.0:0", "--insecure"), {variable: "given"}
    assert http_address(args, environ)
    of_services = secured(args, environ)
    has_file = variable.endswith("KEYS")  # which the coordinator reads too, and then the services have a key
    assert of_services.get("SPECDEC_COORDINATOR__API_KEYS") == ("given" if has_file else None)
    launcher = Launcher(args, up_flags.models(args), endpoint="127.0.0.1:1", http="127.0.0.1:2",
                        redis_url="memory://", metrics={}, environ=of_services)  # fmt: skip
    words = launcher.coordinator_arguments()
    assert ("env:SPECDEC_SERVICE_KEY" in words) == has_file
    assert not {"given", of_services.get("SPECDEC_SERVICE_KEY")} & set(words)


def test_the_gateway_s_metrics_come_last_and_do_not_take_its_address() -> None:
    args = parsed("up", "--metrics", "127.0.0.1:21000")
    with pytest.raises(Usage, match="takes the ports 21000 to 21001, and --http is"):
        metrics_addresses(args, ["coordinator", "gateway"], "127.0.0.1:50051", "127.0.0.1:21001")


def test_settings_of_the_gateway_are_set_by_name_and_those_that_up_chooses_are_refused() -> None:
    args = parsed("up", "--set", "gateway.keep_alive_s=3", "--api-keys", "keys.txt")
    assert args.settings.arguments("gateway") == ["--api-keys", "keys.txt", "--keep-alive-s", "3.0"]
    assert args.settings.arguments("coordinator") == ["--api-keys", "keys.txt"]


@pytest.mark.parametrize("field", ["listen", "coordinator", "redis_url"])
def test_what_up_chooses_for_the_gateway_cannot_be_set(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("up", "--set", f"gateway.{field}=127.0.0.1:1")
    assert "specdec up chooses this setting" in capsys.readouterr().err


def test_a_missing_package_of_the_gateway_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    args = parsed("up", "--http", "127.0.0.1:0", "--listen", "127.0.0.1:0")
    with pytest.raises(ModuleNotFoundError) as refused:
        up.run(args, [], {}, threading.Event())
    told = missing_extra(refused.value, "up").message
    assert (
        told
        == 'specdec up needs the package fastapi, which is not installed: run pip install "specdec-serving[gateway]"'
    )
