"""How `specdec up` is told to scale: real sockets, in a folder of the test's own."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import control
from specdec.cli.__main__ import run
from specdec.cli.control import ControlSocket
from specdec.errors import Unavailable
from specdec.supervision.fleet import Fleet, Scaling
from tests.support.open_files import no_more_files

PORT = 50051


class StillFleet(Fleet):
    """Follows no request by itself: the test ends each."""

    def __init__(self) -> None:
        self.asked: list[dict[str, int] | tuple[str, str]] = []
        self.scaling = Scaling()

    def join(self, pool: str, model: str) -> Scaling:
        self.asked.append((pool, model))
        return self.scaling

    def scale(self, wanted: Any) -> Scaling:
        self.asked.append(wanted)
        return self.scaling


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", None)
    short = tempfile.mkdtemp(dir="/tmp")  # a socket's path is short
    monkeypatch.setenv("TMPDIR", short)
    return Path(short) / f"specdec-up-{os.geteuid()}"


@pytest.fixture
def fleet() -> Iterator[StillFleet]:
    fleet = StillFleet()
    with ControlSocket(PORT, fleet):
        yield fleet


def test_the_socket_lies_where_nobody_else_may_enter_and_is_gone_at_the_end(folder: Path) -> None:
    with ControlSocket(PORT, StillFleet()), ControlSocket(PORT + 1, StillFleet()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(list(folder.iterdir())) == 2
    assert not folder.exists()


def test_what_was_reached_is_told_by_port(fleet: StillFleet) -> None:
    fleet.scaling.end({"target": 2, "draft": 3})
    assert list(control.ask(PORT, {"draft": 3})) == [{"counts": {"target": 2, "draft": 3}}]
    assert fleet.asked == [{"draft": 3}]
    with pytest.raises(Unavailable, match="no specdec up of yours serves port 50052"):
        list(control.ask(PORT + 1, {"draft": 3}))


def test_who_asks_while_no_file_is_left_is_answered_once_there_is_one(fleet: StillFleet, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(20)
        with no_more_files():
            asking.connect(str(folder / f"{PORT}.sock"))
            asking.sendall(b'{"draft": 3}\n')
            time.sleep(0.1)
        fleet.scaling.end({"draft": 3})
        assert json.loads(asking.recv(1024)) == {"counts": {"draft": 3}}
    assert list(control.ask(PORT, {"draft": 3})) == [{"counts": {"draft": 3}}]


def test_a_further_draft_model_is_named_by_its_pool(fleet: StillFleet) -> None:
    fleet.scaling.end({"target": 1, "draft": 1, "draft-new": 1})
    assert list(control.ask(PORT, {"join": {"pool": "new", "model": "/m"}}))[-1].keys() == {"counts"}
    assert fleet.asked == [("new", "/m")]


def test_what_is_waited_for_is_told_until_it_ends(fleet: StillFleet) -> None:
    fleet.scaling.stage = "target-1: loading"
    answers = control.ask(PORT, {"target": 2})
    assert next(answers) == {"stage": "target-1: loading"}
    fleet.scaling.end({"target": 1}, "INTERNAL INTERNAL: no luck")
    assert list(answers)[-1] == {"error": "INTERNAL INTERNAL: no luck"}


@pytest.mark.parametrize(
    "request_line",
    [b"\n", b"nonsense\n", b"[]\n", b"{}\n", b'{"target": "2"}\n', b'{"target": true}\n', b'{"target": 1.5}\n',
     b"[" * 4096, b'{"target": 2', b"\xff\xfe\n", b'{"join": 1}\n', b'{"join": {"pool": "a"}}\n',
     b'{"join": {"pool": "a", "model": ""}}\n', b'{"join": {"pool": "a\\n", "model": "b"}}\n',
     b'{"join": {"pool": "a", "model": "b"}, "draft": 2}\n'],
)  # fmt: skip
def test_what_is_no_request_is_refused_and_the_next_one_is_heard(fleet: StillFleet, request_line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(control._folder(make=False) / f"{PORT}.sock"))
        connection.sendall(request_line)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    assert json.loads(answer)["error"].startswith("INVALID_ARGUMENT INVALID_REQUEST: ")
    assert fleet.asked == []
    fleet.scaling.end({"target": 2})
    assert list(control.ask(PORT, {"target": 2}))[-1] == {"counts": {"target": 2}}


def test_a_socket_that_was_left_behind_is_taken_over_and_old_ones_are_removed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for port in (PORT, PORT + 1, PORT + 2):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(folder / f"{port}.sock"))
    os.utime(folder / f"{PORT + 1}.sock", (0, time.time() - 3600))
    with ControlSocket(PORT, StillFleet()):
        assert {path.name for path in folder.iterdir()} == {f"{PORT}.sock", f"{PORT + 2}.sock"}


def test_another_system_at_the_port_keeps_its_socket(fleet: StillFleet) -> None:
    with pytest.raises(Unavailable, match="another specdec up"), ControlSocket(PORT, StillFleet()):
        pass
    fleet.scaling.end({})
    assert list(control.ask(PORT, {"target": 2}))[-1] == {"counts": {}}


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_folder_that_others_may_enter_is_not_used(
    folder: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(Unavailable, match="nobody else may enter"), ControlSocket(PORT, StillFleet()):
        pass
    assert run(["scale", "target=2", "--endpoint", f"127.0.0.1:{PORT}"], {}) == 1
    assert "nobody else may enter" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["target", "target=", "target=x", "target=1.5", "tgt=2", "target=2 target=3"])
def test_what_is_no_number_of_a_role_is_a_usage_error(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scale", *words.split()], {}) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: INVALID_ARGUMENT INVALID_REQUEST: ")
    assert (captured.err.count("\n"), captured.out) == (1, "")


def test_an_endpoint_of_another_machine_is_refused_whatever_runs_on_this_one(
    fleet: StillFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["scale", "target=2", "--endpoint", f"192.0.2.1:{PORT}"], {}) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("192.0.2.1:50051 is not on this machine: scale runs where specdec up does")
    assert fleet.asked == []


def test_no_system_at_the_port_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scale", "target=2", "--endpoint", f"127.0.0.1:{PORT}"], {}) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        f"error: UNAVAILABLE COORDINATOR_UNAVAILABLE: no specdec up of yours serves port {PORT} on this machine\n"
    )
    assert captured.out == ""
