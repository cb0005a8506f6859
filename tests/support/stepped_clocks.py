"""Wall clocks of single processes that a test steps while they run, as an administrator or NTP steps a machine's.

    clock = SteppedClock(directory / "redis", library=build_library(directory))
    process = subprocess.Popen([*clock.command, "redis-server"])
    clock.step(-30.0)

A small library that is compiled here and loaded before the C library (`stepped_clock.c`) adds an offset to the wall
clock; monotonic clocks go on undisturbed. Timed waits of C++ code that end at a wall-clock time see the kernel's clock.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

_SOURCE = Path(__file__).with_name("stepped_clock.c")


def compiler() -> str | None:
    """Return the C compiler of this machine, None where it has none."""
    return shutil.which("cc")


def build_library(directory: Path) -> Path:
    """Compile the library into a directory. Raises RuntimeError where there is no C compiler."""
    program = compiler()
    if program is None:
        raise RuntimeError("stepped clocks need a C compiler (apt-get install gcc)")
    library = directory / "stepped_clock.so"
    subprocess.run([program, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", library, _SOURCE], check=True)
    return library


class SteppedClock:
    """The wall clock of the processes that are started with `command`; it is right at first."""

    def __init__(self, path: Path, library: Path) -> None:
        """`path`: of the file with its offset, which is made; `library`: of `build_library`."""
        self._path = path
        self._library = library
        self.offset_s = 0.0
        path.write_bytes(struct.pack("=q", 0))

    @property
    def command(self) -> list[str]:
        """What the command of a process under this clock begins with."""
        return ["env", f"LD_PRELOAD={self._library}", f"SPECDEC_TEST_CLOCK={self._path}"]

    def now_s(self) -> float:
        """Return the time that its processes see."""
        return time.time() + self.offset_s

    def step(self, offset_s: float) -> None:
        """Set the clock to `offset_s` seconds ahead of the machine's, or behind it where negative."""
        self.offset_s = offset_s
        with self._path.open("r+b") as file:
            os.pwrite(file.fileno(), struct.pack("=q", round(offset_s * 1e9)), 0)
