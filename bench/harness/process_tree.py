"""A process with all of its descendants: which they are, and the processor time and memory that they use.

The figures come from `/proc`, so they exist on Linux alone. Called by the suites `crowd` and `peers`,
`bench.systems.ray_nodes` and `bench.suites.elastic.recovery`.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Places in /proc/PID/stat after the command's name: the parent, then user and system time of the process and of its
# children that have ended. Source: proc_pid_stat(5).
_PARENT, _TIMES = 1, slice(11, 15)


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below one."""
    parents = {member: int(fields[_PARENT]) for member, fields in _stats()}
    found = [pid]
    for known in found:  # grows while it is read
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process and its descendants have used so far, ended ones included."""
    return sum(cpu_s_of(pid, ()).values())


def cpu_s_of(pid: int, programs: Sequence[str]) -> dict[str, float]:
    """Return the same by program: the first of `programs` that a command line has in it, "" for those with none."""
    members = {pid, *descendants(pid)}
    used_s = dict.fromkeys((*programs, ""), 0.0)
    for member, fields in _stats():
        if member in members:
            command = _command(member) if programs else ""
            name = next((program for program in programs if program in command), "")
            used_s[name] += sum(map(int, fields[_TIMES])) / _TICKS_PER_S
    return used_s


def pss_bytes(pid: int, program: str = "") -> int:
    """Return the memory of a process and its descendants; a page that several processes share counts in parts.

    `program`: only processes with this in their command lines count.
    """
    total = 0
    for member in (pid, *descendants(pid)):
        if program not in _command(member):
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines = (_PROC / str(member) / "smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        return (_PROC / str(pid) / "cmdline").read_text()
    return ""


def _stats() -> Iterator[tuple[int, list[str]]]:
    for path in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()
