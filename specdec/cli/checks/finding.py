"""Findings of `specdec doctor`, and the time limit of a check."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from specdec.cli.extras import missing_extra
from specdec.contract.errors import SpecdecError, error_line


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    """The system works, and could be faster or safer."""
    FAIL = "fail"
    """Something does not work, or sessions can be lost."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    status: Status
    check: str
    """Name of the check, such as "redis memory"."""
    found: str
    """State that was found, and the problem with it."""
    advice: str = ""
    """Advice; "" if nothing is wrong."""


def ok(check: str, found: str) -> Finding:
    return Finding(Status.OK, check, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(Status.WARN, check, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(Status.FAIL, check, found, advice)


@dataclass(frozen=True, slots=True)
class Check:
    """One subject: a function that yields findings, and the time that it may take."""

    name: str
    """Name of the finding that reports a failure of the check itself."""
    run: Callable[[], Iterable[Finding]]
    limit_s: float


def findings_of(check: Check) -> Iterator[Finding]:
    """Run a check in a thread and yield what it finds; end after its time limit, even if it hangs."""
    found: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            for finding in check.run():
                found.put(finding)
        except Exception as error:
            found.put(_of_error(check.name, error))
        found.put(None)

    # A daemon, so that a check that hangs does not keep the process.
    threading.Thread(target=run, name=f"check {check.name}", daemon=True).start()
    ends_s = time.monotonic() + check.limit_s
    while True:
        try:
            finding = found.get(timeout=max(0.0, ends_s - time.monotonic()))
        except queue.Empty:
            yield fail(check.name, f"no answer within {check.limit_s:g} s", "look at its log and at the network")
            return
        if finding is None:
            return
        yield finding


def _of_error(name: str, error: Exception) -> Finding:
    if isinstance(error, ModuleNotFoundError):
        try:
            missing = missing_extra(error, "doctor").message
            return warn(name, f"not checked without the package {error.name}", missing.partition(": ")[2])
        except ModuleNotFoundError:
            return fail(name, f"the package {error.name} is missing", "install specdec again")
    if isinstance(error, SpecdecError):
        return fail(name, error_line(error).removeprefix("error: "), "see specdec's reference of errors")
    return fail(name, f"the check failed: {type(error).__name__}: {error}", "report this")
