"""The control socket of `specdec up`: real sockets, in a folder of the test's own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import control
from specdec.cli.__main__ import run
from specdec.cli.control import ControlSocket, RunningSystem
from specdec.cli.control_folder import control_folder
from specdec.cli.starting import await_start
from specdec.contract.errors import Internal, Unavailable
from specdec.supervision.fleet import Fleet, Scaling
from tests.support.open_files import no_more_files

PORT = 50051


class StillFleet(Fleet):
    """A fleet that records requests and follows none: the test ends each."""

    def __init__(self) -> None:
        self.asked: list[dict[str, int] | tuple[str, str]] = []
        self.scaling = Scaling()

    def join(self, pool: str, model: str) -> Scaling:
        self.asked.append((pool, model))
        return self.scaling

    def scale(self, wanted: Any) -> Scaling:
        self.asked.append(wanted)
        return self.scaling


def ready_system(fleet: Fleet) -> RunningSystem:
    system = RunningSystem(threading.Event())
    system.set_ready(fleet)
    return system


def still_system() -> RunningSystem:
    return ready_system(StillFleet())


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", None)
    short = tempfile.mkdtemp(dir="/tmp")  # the path of a socket must be short
    monkeypatch.setenv("TMPDIR", short)
    return Path(short) / f"specdec-up-{os.geteuid()}"


@pytest.fixture
def fleet() -> Iterator[StillFleet]:
    fleet = StillFleet()
    with ControlSocket(PORT, ready_system(fleet)):
        yield fleet


def test_only_the_user_may_enter_the_folder_of_sockets_and_it_is_removed_at_the_end(folder: Path) -> None:
    with ControlSocket(PORT, still_system()), ControlSocket(PORT + 1, still_system()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(list(folder.iterdir())) == 2
    assert not folder.exists()


def test_a_running_system_names_the_metrics_addresses_of_its_services() -> None:
    system = RunningSystem(threading.Event())
    with ControlSocket(PORT, system):
        assert list(control.ask(PORT, {"metrics": {}})) == [{"metrics": {}}]
        system.set_ready(StillFleet(), lambda: {"coordinator": "127.0.0.1:9000"})
        assert list(control.ask(PORT, {"metrics": {}})) == [{"metrics": {"coordinator": "127.0.0.1:9000"}}]


def test_scale_json_is_one_object_with_the_numbers_that_were_reached(
    fleet: StillFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.scaling.end({"target": 2, "draft": 1})
    assert run(["scale", "target=2", "--json", "--endpoint", f"127.0.0.1:{PORT}"], {}) == 0
    assert json.loads(capsys.readouterr().out) == {"counts": {"target": 2, "draft": 1}}


def test_a_system_that_starts_says_what_it_waits_for_and_then_that_it_is_ready() -> None:
    system = RunningSystem(threading.Event())
    system.stage = "target-0: loading weights"
    with ControlSocket(PORT, system):
        answers = control.ask(PORT, {"wait": {}})
        assert next(answers) == {"stage": "target-0: loading weights"}
        system.set_ready(StillFleet())
        assert list(answers)[-1] == {"ready": True}
        assert list(control.ask(PORT, {"wait": {}})) == [{"ready": True}]


def test_a_system_that_starts_refuses_other_numbers_and_says_how_far_it_is() -> None:
    system = RunningSystem(threading.Event())
    system.stage = "checking models"
    with (
        ControlSocket(PORT, system),
        pytest.raises(Unavailable, match="the system is still starting: checking models"),
    ):
        list(control.ask(PORT, {"draft": 2}))


def test_a_command_waits_for_a_system_that_starts_and_shows_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()  # pytest's own capture loses what another thread writes while it is read
    monkeypatch.setattr(sys, "stderr", stderr)
    system = RunningSystem(threading.Event())
    system.stage = "target-0: loading weights"
    with ControlSocket(PORT, system):
        waiting = threading.Thread(target=await_start, args=(f"127.0.0.1:{PORT}",))
        waiting.start()
        while "target-0: loading weights" not in (shown := stderr.getvalue()):
            time.sleep(0.01)
        assert waiting.is_alive()
        system.set_ready(StillFleet())
        waiting.join()
    assert re.match(rf"waiting for specdec up at 127\.0\.0\.1:{PORT} \(\d+ s\): ", shown)


def test_a_command_that_waits_for_a_system_is_told_when_its_start_fails() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        folder = control_folder(make=True)
        listener.bind(str(folder / f"{PORT}.sock"))
        listener.listen()

        def answer_and_end() -> None:
            for _ in range(2):  # the probe, then the request
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(1024)

        threading.Thread(target=answer_and_end, daemon=True).start()
        with pytest.raises(Unavailable, match=f"specdec up at 127.0.0.1:{PORT} ended before it was ready"):
            await_start(f"127.0.0.1:{PORT}")


def test_a_command_does_not_wait_for_an_endpoint_of_another_machine_or_where_nothing_starts() -> None:
    await_start("192.0.2.1:50051")
    await_start("127.0.0.1:1")


def test_a_request_to_stop_sets_the_stop_event_and_is_answered_until_the_process_ends() -> None:
    stop = threading.Event()
    with ControlSocket(PORT, RunningSystem(stop)):
        answers = control.ask(PORT, {"stop": {}})
        assert next(answers) == {"stage": "stopping"}
        assert stop.is_set()


def test_down_without_a_system_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["down", "--endpoint", f"127.0.0.1:{PORT}"], {}) == 1
    expected = f"error: no specdec up of yours serves port {PORT} on this machine (COORDINATOR_UNAVAILABLE)\n"
    assert capsys.readouterr().err == expected


def test_up_at_the_port_of_a_system_that_is_still_starting_names_that_system(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ControlSocket(PORT, RunningSystem(threading.Event())):
        assert run(["up", "--listen", f"127.0.0.1:{PORT}", "--target", "/no/such/model"], {}) == 1
    expected = (
        f"error: your specdec up at 127.0.0.1:{PORT} is still running; stop it with `specdec down`, or choose another "
        "address with --listen (ADDRESS_IN_USE)\n"
    )
    assert capsys.readouterr().err == expected


def test_the_numbers_that_were_reached_are_returned_by_port(fleet: StillFleet) -> None:
    fleet.scaling.end({"target": 2, "draft": 3})
    assert list(control.ask(PORT, {"draft": 3})) == [{"counts": {"target": 2, "draft": 3}}]
    assert fleet.asked == [{"draft": 3}]
    with pytest.raises(Unavailable, match="no specdec up of yours serves port 50052"):
        list(control.ask(PORT + 1, {"draft": 3}))


def test_a_caller_without_a_file_descriptor_left_is_answered_once_there_is_one(fleet: StillFleet, folder: Path) -> None:
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


def test_the_stage_of_a_request_is_reported_until_it_fails(fleet: StillFleet) -> None:
    fleet.scaling.stage = "target-1: loading"
    answers = control.ask(PORT, {"target": 2})
    assert next(answers) == {"stage": "target-1: loading"}
    fleet.scaling.end({"target": 1}, Internal("no luck"))
    with pytest.raises(Internal, match="no luck"):
        list(answers)


@pytest.mark.parametrize(
    "request_line",
    [b"\n", b"nonsense\n", b"[]\n", b"{}\n", b'{"target": "2"}\n', b'{"target": true}\n', b'{"target": 1.5}\n',
     b"[" * 4096, b'{"target": 2', b"\xff\xfe\n", b'{"join": 1}\n', b'{"join": {"pool": "a"}}\n',
     b'{"join": {"pool": "a", "model": ""}}\n', b'{"join": {"pool": "a\\n", "model": "b"}}\n',
     b'{"join": {"pool": "a", "model": "b"}, "draft": 2}\n'],
)  # fmt: skip
def test_a_malformed_request_is_refused_and_the_next_one_is_served(fleet: StillFleet, request_line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(control_folder(make=False) / f"{PORT}.sock"))
        connection.sendall(request_line)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    assert json.loads(answer)["error"].endswith(" (INVALID_REQUEST)")
    assert fleet.asked == []
    fleet.scaling.end({"target": 2})
    assert list(control.ask(PORT, {"target": 2}))[-1] == {"counts": {"target": 2}}


def test_a_stale_socket_is_taken_over_and_old_ones_are_removed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for port in (PORT, PORT + 1, PORT + 2):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(folder / f"{port}.sock"))
    os.utime(folder / f"{PORT + 1}.sock", (0, time.time() - 3600))
    with ControlSocket(PORT, still_system()):
        assert {path.name for path in folder.iterdir()} == {f"{PORT}.sock", f"{PORT + 2}.sock"}


def test_another_system_at_the_port_keeps_its_socket(fleet: StillFleet) -> None:
    with pytest.raises(Unavailable, match="your specdec up at"), ControlSocket(PORT, still_system()):
        pass
    fleet.scaling.end({})
    assert list(control.ask(PORT, {"target": 2}))[-1] == {"counts": {}}


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_folder_that_others_may_enter_is_not_used(
    folder: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(Unavailable, match="no other user may enter"), ControlSocket(PORT, still_system()):
        pass
    assert run(["scale", "target=2", "--endpoint", f"127.0.0.1:{PORT}"], {}) == 1
    assert "no other user may enter" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["target", "target=", "target=x", "target=1.5", "tgt=2", "target=2 target=3"])
def test_scale_refuses_arguments_that_are_not_a_role_and_a_number(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["scale", *words.split()], {}) == 2
    captured = capsys.readouterr()
    assert captured.err.endswith(" (INVALID_REQUEST)\n")
    assert (captured.err.count("\n"), captured.out) == (1, "")


def test_an_endpoint_on_another_machine_is_refused_even_if_a_system_runs_here(
    fleet: StillFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["scale", "target=2", "--endpoint", f"192.0.2.1:{PORT}"], {}) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "192.0.2.1:50051 is not on this machine: specdec scale and join run where specdec up does (INVALID_REQUEST)"
    )
    assert fleet.asked == []


def test_no_system_at_the_port_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scale", "target=2", "--endpoint", f"127.0.0.1:{PORT}"], {}) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        f"error: no specdec up of yours serves port {PORT} on this machine (COORDINATOR_UNAVAILABLE)\n"
    )
    assert captured.out == ""
