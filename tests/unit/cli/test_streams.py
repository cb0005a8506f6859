"""Commands whose standard streams are closed, full or broken end with one line and an exit code."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from specdec.cli.__main__ import _stop_event


def shell(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `specdec ARGUMENTS` with the redirections of `command`."""
    line = f'exec "$0" -m specdec.cli "$@" {command}'
    return subprocess.run(["bash", "-c", line, sys.executable, *arguments], capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip


def test_output_onto_a_full_disk_is_one_line() -> None:
    ended = shell(">/dev/full", "completion", "bash")
    assert (ended.returncode, ended.stderr) == (1, "error: No space left on device\n")


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_empty_or_lead_nowhere(closed: str) -> None:
    ended = shell(closed, "completion", "bash")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert bool(ended.stdout) == (">&-" not in closed.replace("2>&-", ""))


def test_no_input_and_a_closed_one_are_refused_alike() -> None:
    closed, empty = (shell(way, "generate", "-", "--endpoint", "127.0.0.1:1") for way in ("<&-", "</dev/null"))
    assert (closed.returncode, closed.stderr) == (empty.returncode, empty.stderr)
    assert "Traceback" not in closed.stderr


@pytest.mark.parametrize("is_ignored", [True, False])
def test_a_system_under_nohup_outlives_its_terminal(is_ignored: bool) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        stop = _stop_event()
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == is_ignored
        signal.raise_signal(signal.SIGHUP)
        assert stop.is_set() != is_ignored
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
