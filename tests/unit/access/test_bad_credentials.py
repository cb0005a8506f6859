"""Credentials that no service starts with: one line on stderr that names the flag and the file, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.__main__ import main as run_coordinator
from draft_service.__main__ import main as run_draft
from gateway.__main__ import main as run_gateway
from specdec.access import guards
from specdec.access.service_key import ServiceKey, read_service_key
from specdec.contract.errors import Forbidden, InvalidRequest, Unauthenticated
from tests.support.key_files import key_line, write_private
from tests.support.log_stream import stream  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("stream")  # the services that run here set up the root logger

SECRET = "a-secret-of-32-characters-or-more"


def refusal(capsys: pytest.CaptureFixture[str], run: object, *flags: str) -> str:
    """Return the only line that a service which refuses its settings prints."""
    with pytest.raises(SystemExit) as ended:
        run(list(flags))  # type: ignore[operator]
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("rest", ["acme generate tpm=-1", "x" * (1 << 20) + " generate", "acme generate,fly"])
def test_a_key_file_with_a_mistake_is_refused_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rest: str
) -> None:
    keys = write_private(tmp_path / "keys", key_line(SECRET, rest))
    for run, flags in ((run_coordinator, ("--tokenizer", "t")), (run_gateway, ("--coordinator", "127.0.0.1:1"))):
        line = refusal(capsys, run, "--api-keys", str(keys), *flags)
        assert line.startswith("error: api_keys: line 1: ")
        assert len(line) < 400


def test_a_secret_that_others_may_change_is_refused_by_every_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_private(tmp_path / "service.key", SECRET)
    path.chmod(0o666)
    services = (
        (run_coordinator, ("--tokenizer", "t")),
        (run_gateway, ("--coordinator", "127.0.0.1:1")),
        (run_draft, ("--model", "m")),
    )
    for run, flags in services:
        line = refusal(capsys, run, "--service-key", str(path), *flags)
        assert "service_key: other users may" in line
        assert f"{path} (mode 666): run chmod 600" in line
        assert SECRET not in line


def test_a_host_that_is_refused_again_and_again_is_logged_once_in_an_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "LOG_INTERVAL_S", 1e6)
    log = guards.RefusalLog()
    for port in range(5):
        log.note(f"ipv4:10.0.0.1:{port}", Unauthenticated("the API key is unknown"))
    log.note("ipv6:[::1]:1", Forbidden("another"))
    assert [(record.getMessage(), record.reason) for record in caplog.records] == [  # type: ignore[attr-defined]
        ("refused a caller: the API key is unknown", "UNAUTHENTICATED"),
        ("refused a caller: another", "FORBIDDEN"),
    ]


@pytest.mark.parametrize("text", ["short", "with a space " * 3, "", "ünïcode" * 8])
def test_a_service_key_that_cannot_be_sent_or_is_guessed_is_refused_without_being_shown(
    tmp_path: Path, text: str
) -> None:
    path = write_private(tmp_path / "service.key", text)
    for source, environ in ((str(path), {}), ("env:KEY", {"KEY": text})):
        with pytest.raises(InvalidRequest, match="service_key: ") as refused:
            read_service_key(source, environ)
        assert not text or text not in refused.value.message
    with pytest.raises(InvalidRequest, match="environment variable KEY is not set"):
        read_service_key("env:KEY", {})


def test_several_lines_of_a_service_key_are_accepted_and_the_first_is_sent(tmp_path: Path) -> None:
    key = read_service_key(str(write_private(tmp_path / "k", f"{'n' * 32}\n{'o' * 32}\n")), {})
    assert key is not None
    assert key.bearer == "n" * 32
    assert [key.accepts(each * 32) for each in "nox"] == [True, True, False]
    assert key.verify(b"record", ServiceKey("o" * 32).sign(b"record"))
    assert not key.verify(b"record", ServiceKey("x" * 32).sign(b"record"))
    assert not key.verify(b"other", key.sign(b"record"))


@pytest.mark.parametrize(
    ("jwks", "words"),
    [
        ("{}", "not a JSON web key set"),
        ('{"keys": [{"kty": "EC", "crv": "P-256"}]}', "the set has no public key of"),
        ('{"keys": 5}', "not a JSON web key set"),
        (json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}]}), "the set has no public key of"),
    ],
)
def test_a_key_set_without_public_keys_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], jwks: str, words: str
) -> None:
    (tmp_path / "jwks").write_text(jwks)
    flags = ("--tokenizer", "t", "--jwt-jwks", str(tmp_path / "jwks"), "--jwt-issuer", "i")
    assert words in refusal(capsys, run_coordinator, *flags, "--jwt-audience", "a")
    (tmp_path / "jwks").chmod(0o666)
    assert "other users may write" in refusal(capsys, run_coordinator, *flags, "--jwt-audience", "a")
    assert "must be given together" in refusal(capsys, run_coordinator, *flags)
