"""Processes that a template forks end, answer signals and read their settings as those of `python -m` do."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.process_template import ForkedProcess, Streams, start_like
from tests.support.stack import free_port

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}


def gateway(log: Path, *arguments: str, **environ: str) -> subprocess.Popen[bytes] | ForkedProcess:
    flags = ["--redis-url", "memory://", "--coordinator", "127.0.0.1:1", *arguments]
    with open(os.devnull, "rb") as nothing, log.open("wb") as file:
        return start_like("gateway", flags, ENVIRON | environ, Streams(nothing, file, file))


def serving_gateway(log: Path) -> subprocess.Popen[bytes] | ForkedProcess:
    process = gateway(log, "--listen", f"127.0.0.1:{free_port()}")
    while "listening" not in log.read_text():
        try:
            pytest.fail(f"exit code {process.wait(0.05)}: {log.read_text()}")
        except subprocess.TimeoutExpired:
            continue
    return process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_forked_service_is_a_process_that_ends_by_a_signal(tmp_path: Path, number: int, code: int) -> None:
    process = serving_gateway(tmp_path / "log")
    assert isinstance(process, ForkedProcess)
    assert process.poll() is None
    assert len({process.pid, os.getpid(), int(Path(f"/proc/{process.pid}/stat").read_text().split()[3])}) == 3
    process.send_signal(number)
    assert (process.wait(), process.poll()) == (code, code)
    process.kill()  # as with `Popen`, without an effect


def test_flags_and_settings_of_the_environment_are_those_of_the_call(tmp_path: Path) -> None:
    refused = [
        gateway(tmp_path / "flag", "--max-body-bytes", "no number"),
        gateway(tmp_path / "environment", SPECDEC_GATEWAY__MAX_BODY_BYTES="no number"),
    ]
    assert [process.wait() for process in refused] == [2, 2]
    for name in ("flag", "environment"):
        (line,) = (tmp_path / name).read_text().splitlines()
        assert line.startswith("error: ")
        assert "Input should be a valid integer" in line


def test_a_variable_that_imports_may_read_makes_a_plain_process(tmp_path: Path) -> None:
    process = gateway(tmp_path / "log", "--no-such-flag", OMP_NUM_THREADS="3")
    assert isinstance(process, subprocess.Popen)
    assert process.wait() == 2
