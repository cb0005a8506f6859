"""Flags of transport security: certificate files that cannot be used, and plaintext that other machines can reach."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli.__main__ import run
from specdec.settings.coordinator import CoordinatorSettings
from specdec.settings.draft import DraftSettings
from specdec.settings.gateway import GatewaySettings
from specdec.settings.reading import parse_settings
from specdec.settings.shared import ProcessSettings
from specdec.settings.target import TargetSettings
from tests.support.certificates import Authority, Pair

KINDS: dict[str, tuple[type[ProcessSettings], list[str]]] = {
    "draft": (DraftSettings, ["--model", "m"]),
    "target": (TargetSettings, ["--model", "m"]),
    "coordinator": (CoordinatorSettings, ["--tokenizer", "t"]),
    "gateway": (GatewaySettings, ["--allow-anonymous"]),
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.issue("service")


def parse(kind: str, *flags: str) -> ProcessSettings:
    settings_type, required = KINDS[kind]
    return parse_settings(settings_type, prog=kind, argv=[*required, *flags])


def refused(capsys: pytest.CaptureFixture[str], kind: str, *flags: str) -> str:
    """The one line with which a service ends before it does anything."""
    with pytest.raises(SystemExit) as ended:
        parse(kind, *flags)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("kind", KINDS)
def test_an_address_beyond_loopback_needs_a_certificate_or_a_word(
    kind: str, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    public = ["--listen", "0.0.0.0:50000"]
    assert "--listen 0.0.0.0:50000 is reached from other machines" in refused(capsys, kind, *public)
    assert parse(kind, *public, "--insecure").server_tls is None
    settings = parse(kind, *public, "--tls-cert", pair.cert, "--tls-key", pair.key)
    assert settings.server_tls is not None
    assert settings.channel_tls is None


MISTAKES: dict[str, tuple[Callable[[Authority, Path], list[str]], str]] = {
    "no key": (lambda ca, tmp: ["--tls-cert", ca.issue("a").cert], "--tls-key: the key of the certificate"),
    "no certificate": (lambda ca, tmp: ["--tls-key", ca.issue("a").key], "--tls-cert: the certificate of the key"),
    "another key": (
        lambda ca, tmp: ["--tls-cert", ca.issue("a").cert, "--tls-key", ca.issue("b").key],
        "b.key is not the key of the certificate",
    ),
    "missing": (
        lambda ca, tmp: ["--tls-cert", str(tmp / "gone.pem"), "--tls-key", ca.issue("a").key],
        "gone.pem: No such file or directory",
    ),
    "readable": (lambda ca, tmp: open_to_others(ca.issue("a")), "(mode 0644); run chmod 600"),
    "expired": (lambda ca, tmp: of(ca.issue("a", days=-1)), "certificate has expired"),
    "no PEM": (lambda ca, tmp: [*of(ca.issue("a")), "--tls-ca", ca.issue("a").key], "has no certificate in PEM form"),
}


def of(pair: Pair) -> list[str]:
    return ["--tls-cert", pair.cert, "--tls-key", pair.key]


def open_to_others(pair: Pair) -> list[str]:
    os.chmod(pair.key, 0o644)
    return of(pair)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_files_that_cannot_be_used_are_refused_by_services_and_by_up_with_the_flag_and_the_file(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = MISTAKES[mistake]
    flags = make(Authority(tmp_path), tmp_path)
    line = refused(capsys, "coordinator", *flags)
    assert line.startswith("error: --tls-")
    assert words in line
    assert run(["up", *flags], {}) == 2
    assert capsys.readouterr().err == line + "\n"


@pytest.mark.parametrize("kind", ["draft", "target", "coordinator"])
def test_authorities_without_an_own_certificate_are_refused_except_at_a_gateway(
    kind: str, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--tls-ca needs --tls-cert and --tls-key" in refused(capsys, kind, "--tls-ca", authority.path)
    assert parse("gateway", "--tls-ca", authority.path).channel_tls is not None


def test_settings_that_go_with_tls_are_refused_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tls-server-name needs --tls-ca" in refused(capsys, "coordinator", "--tls-server-name", "n")
    assert "--tls-server-name needs --tls-ca" in refused(capsys, "gateway", "--tls-server-name", "n")
    assert "--admin 0.0.0.0:1 is reached from other" in refused(capsys, "coordinator", "--admin", "0.0.0.0:1")
    without_keys = refused(capsys, "coordinator", "--admin", "0.0.0.0:1", "--insecure")
    assert "--admin 0.0.0.0:1 is reached from other machines: give --api-keys" in without_keys
    assert "--loopback must be an address of loopback" in refused(capsys, "coordinator", "--loopback", "0.0.0.0:1")


def test_a_key_of_root_may_be_read_by_the_group_of_another_user(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Kubernetes mounts a secret for a process that is not root."""
    own = authority.issue("mounted")
    os.chmod(own.key, 0o640)
    assert "mode 0640" in refused(capsys, "draft", *of(own))
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 10001)
        assert parse("draft", *of(own)).server_tls is not None
