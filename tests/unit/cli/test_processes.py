"""Children of `specdec up`: what they say, how they end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

import specdec
from specdec.contract.errors import error_line
from specdec.supervision.processes import Child, free_ports


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    """An environment in which modules written to `tmp_path` can be run."""
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def write_module(directory: Path, source: str) -> str:
    (directory / "some_service.py").write_text(source)
    return "some_service"


WAITS = "import signal\nprint('up', flush=True)\nsignal.sigwait([signal.SIGTERM])\n"


def wait_for_end(child: Child) -> None:
    child._process.wait()


def test_the_last_line_of_a_child_that_fails_is_its_reason(tmp_path: Path, environ: Mapping[str, str]) -> None:
    source = 'import sys\nprint(\'loading\')\nprint(\'{"level": "INFO", "message": "listening"}\')\n'
    module = write_module(tmp_path, source + "sys.exit('error: no such model: /x')\n")
    child = Child("target-0", module, [], environ)
    wait_for_end(child)
    assert child.last_words() == "no such model: /x"
    child.stop()


def test_a_child_without_output_is_reported_by_its_exit_code(tmp_path: Path, environ: Mapping[str, str]) -> None:
    child = Child("target-0", write_module(tmp_path, "raise SystemExit(3)"), [], environ)
    wait_for_end(child)
    assert child.last_words() == "exit code 3"
    child.stop()


def test_a_service_sees_its_own_arguments_and_main(tmp_path: Path, environ: Mapping[str, str]) -> None:
    child = Child("x", write_module(tmp_path, "import sys\nprint(__name__, sys.argv[1:])"), ["--model", "m"], environ)
    wait_for_end(child)
    assert child.last_words() == "__main__ ['--model', 'm']"
    child.stop()


def test_after_the_start_lines_are_relayed_with_the_childs_name_and_info_records_are_not(
    tmp_path: Path, environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        '{"level": "INFO", "message": "quiet"}',
        '{"level": "WARNING", "message": "the draft pool is gone"}',
        "plain words",
        "[1]",
    ]
    started = tmp_path / "started"
    os.mkfifo(started)
    source = (
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({chr(10).join(records)!r}))\n"
        f"print('loading', flush=True)\nopen({str(started)!r}, 'w').close()\n"
        "while True:\n    time.sleep(0.01)\n"
    )
    child = Child("coordinator", write_module(tmp_path, source), [], environ)
    started.read_text()  # returns when the child has opened its end
    while not child._held:  # its line is on its way
        time.sleep(0.001)
    child.relay()
    child.stop()
    assert capsys.readouterr().err.splitlines() == [
        "[coordinator] the draft pool is gone",
        "[coordinator] plain words",
        "[coordinator] [1]",
    ]


def write_records(directory: Path, *records: Mapping[str, str]) -> str:
    lines = "\n".join(json.dumps(record) for record in records)
    return write_module(directory, f"print({lines!r})")


def test_records_from_info_up_are_told_while_it_starts_and_the_last_one_is_its_stage(
    tmp_path: Path, environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        {"level": "info", "message": "loading /m"},
        {"level": "warning", "message": "slower without\nnative kernels"},
        {"level": "info", "message": "warming up"},
        {"level": "debug", "message": "a detail"},
    ]
    child = Child("target-0", write_records(tmp_path, *records), [], environ)
    wait_for_end(child)
    assert child.last_words() == "exit code 0"
    assert child.stage == "a detail"
    assert capsys.readouterr().err.splitlines() == [
        "[target-0] loading /m",
        "[target-0] slower without native kernels",
        "[target-0] warming up",
    ]
    child.stop()


def test_an_error_record_is_shown_and_is_the_reason_of_the_end(
    tmp_path: Path, environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"level": "error", "message": "the device is gone"}, {"level": "info", "message": "stopped"}]
    child = Child("target-0", write_records(tmp_path, *records), [], environ)
    wait_for_end(child)
    assert child.last_words() == "the device is gone"
    assert capsys.readouterr().err == "[target-0] the device is gone\n[target-0] stopped\n"
    child.stop()


def test_a_refused_replica_is_kept_by_its_address(tmp_path: Path, environ: Mapping[str, str]) -> None:
    words = {"message": "refused: x", "refused": "h:1", "code": "FAILED_PRECONDITION", "reason": "VOCABULARY_MISMATCH"}
    child = Child("coordinator", write_records(tmp_path, {"level": "error", **words}), [], environ)
    wait_for_end(child)
    child.stop()
    assert error_line(child.refusals["h:1"]) == "error: refused: x (VOCABULARY_MISMATCH)"


def test_a_child_imports_the_same_packages_from_any_working_directory(
    tmp_path: Path, environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_module(tmp_path, "import specdec\nprint(specdec.__version__, specdec.__file__)")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "specdec").mkdir(parents=True)
    (elsewhere / "specdec" / "__init__.py").touch()
    monkeypatch.chdir(elsewhere)
    child = Child("x", module, [], environ)
    wait_for_end(child)
    assert child.last_words() == f"{specdec.__version__} {specdec.__file__}"
    child.stop()


def test_stop_ends_a_running_child_and_may_be_called_twice(tmp_path: Path, environ: Mapping[str, str]) -> None:
    child = Child("x", write_module(tmp_path, WAITS), [], environ)
    assert child.is_alive
    child.stop()
    assert not child.is_alive
    child.stop()


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path, environ: Mapping[str, str]) -> None:
    write_module(tmp_path, WAITS)
    parent_source = (
        "import os, signal\nfrom specdec.supervision.processes import Child\n"
        "child = Child('x', 'some_service', [], os.environ)\n"
        "print(child._process.pid, flush=True)\nsignal.pause()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_source], env=environ, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with contextlib.closing(parent.stdout):
        child_pid = int(parent.stdout.readline())
        descriptor = os.pidfd_open(child_pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        select.select([descriptor], [], [])
        os.close(descriptor)


def test_a_childs_output_is_read_even_if_it_cannot_be_shown(
    tmp_path: Path, environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that is not read would block the child once it is full."""
    much = "import sys\nfor _ in range(3000):\n    print('x' * 100)\nprint('done')\n"
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        child = Child("x", write_module(tmp_path, much), [], environ)
        child.relay()
        assert child._process.wait(20) == 0
        child.stop()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_free_ports_are_different_and_outside_the_ephemeral_range() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    given_out = Path("/proc/sys/net/ipv4/ip_local_port_range")
    assert max(ports) < (int(given_out.read_text().split()[0]) if given_out.exists() else 49_152)


def test_a_child_loads_nothing_from_the_folder_it_was_started_in(
    tmp_path: Path, environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that other users may write to, a file named like a module would run with this user's rights."""
    module = write_module(tmp_path, "import queue\nprint('own', flush=True)\n")
    anywhere = tmp_path / "anywhere"
    anywhere.mkdir()
    for name in ("queue", "runpy", "specdec", "some_service", "sitecustomize"):
        (anywhere / f"{name}.py").write_text("raise SystemExit('intruded')")
    monkeypatch.chdir(anywhere)
    child = Child("x", module, [], environ)
    wait_for_end(child)
    assert child.last_words() == "own"
    child.stop()


def test_the_first_error_line_of_several_processes_is_the_reason(tmp_path: Path, environ: Mapping[str, str]) -> None:
    source = (
        "print('loading')\nprint('error: no such device (INVALID_REQUEST)')\n"
        'print(\'{"level": "ERROR", "message": "leaving: rank 0 is gone"}\')\n'
        "print('error: a rank is gone (REPLICA_UNAVAILABLE)')\nraise SystemExit(1)\n"
    )
    child = Child("target-0", write_module(tmp_path, source), [], environ)
    wait_for_end(child)
    assert error_line(child.failure()) == "error: no such device (INVALID_REQUEST)"
    child.stop()
