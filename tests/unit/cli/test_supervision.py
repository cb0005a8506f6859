"""Children of `specdec up` that end are started again; a clock of the test's own, real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from specdec.supervision.processes import Child
from specdec.supervision.supervisor import Supervisor
from tests.support.clock import Clock

SERVES = (
    "import signal\n"
    "print('loading', flush=True)\n"
    """print('{"level": "info", "message": "listening", "advertised": "h:1"}', flush=True)\n"""
    "signal.sigwait([signal.SIGTERM])\n"
)
FAILS = "import sys\nsys.exit('error: no luck (INTERNAL)')\n"


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.fixture
def children(tmp_path: Path, environ: Mapping[str, str]) -> Iterator[list[Child]]:
    """Two that serve; the second is never touched."""
    (tmp_path / "some_service.py").write_text(SERVES)
    started = [Child(name, "some_service", ["--listen", "h:1"], environ) for name in ("target-0", "coordinator")]
    for child in started:
        wait_for_start(child)
        child.relay()
    yield started
    for child in started:
        child.stop()


def wait_for_start(child: Child) -> None:
    while not child.has_started:
        time.sleep(0.01)


def end(child: Child) -> None:
    os.kill(child.pid, signal.SIGKILL)
    child._process.wait()


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "listening" not in line]


def test_a_killed_child_comes_back_after_a_second_with_its_own_arguments(
    children: list[Child], capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    supervisor, (killed, other) = Supervisor(children, clock), tuple(children)
    end(killed)
    for passed_s in (0.0, 0.5, 0.4):
        clock.now_s += passed_s
        supervisor.look()
    assert children == [killed, other]
    assert told(capsys) == ["[target-0] ended (signal 9), restarting in 1 s"]
    clock.now_s += 0.1
    supervisor.look()
    assert children[0] is not killed
    assert children[1] is other
    assert (children[0].is_alive, children[0].arguments) == (True, killed.arguments)
    wait_for_start(children[0])
    supervisor.look()
    assert told(capsys) == ["[target-0] serving again"]


def test_the_pause_doubles_up_to_half_a_minute_and_is_forgotten_after_a_minute_of_health(
    children: list[Child], capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    supervisor = Supervisor(children, clock)

    def end_again() -> float:
        """Seconds until it is back."""
        end(children[0])
        ended, began_s = children[0], clock.now_s
        while children[0] is ended:
            supervisor.look()
            clock.now_s += 0.5
        return clock.now_s - began_s - 0.5

    assert [end_again() for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    clock.now_s += 59
    assert end_again() == 30
    clock.now_s += 60
    assert end_again() == 1
    assert "[target-0] ended (signal 9), restarting in 30 s" in told(capsys)


def test_a_child_that_fails_at_its_restart_says_why_and_is_tried_again(
    children: list[Child], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    supervisor = Supervisor(children, clock)
    (tmp_path / "some_service.py").write_text(FAILS)
    end(children[0])
    supervisor.look()
    clock.now_s += 1
    supervisor.look()
    children[0]._process.wait()
    supervisor.look()
    assert told(capsys) == [
        "[target-0] ended (signal 9), restarting in 1 s",
        "[target-0] ended (exit code 1: no luck (INTERNAL)), restarting in 2 s",
    ]


def test_a_child_that_waits_for_its_restart_is_stopped_like_any_other(children: list[Child]) -> None:
    supervisor = Supervisor(children, Clock())
    end(children[0])
    supervisor.look()
    for child in children:
        child.stop()
    assert not any(child.is_alive for child in children)
