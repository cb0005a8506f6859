"""Run a command while other processes keep the machine's load high: `python -m tests.support.loaded LOAD COMMAND...`.

Failure and end-to-end tests must pass on a machine with five times the load (`make test-loaded`): busy processes take
the place of neighbours, and every wait in the tests has to hold without the processor that it expects.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

#: A process that never waits. It ends with its parent, whose end of the pipe closes.
_BUSY = (
    "import sys, threading; threading.Thread(target=sys.stdin.read).start()\nwhile threading.active_count() > 1: pass"
)


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` processes running that take all the processor time they get."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY], stdin=subprocess.PIPE))
            stack.callback(process.kill)
        yield


def main() -> int:
    load, *command = sys.argv[1:]
    with busy_processes(int(load)):
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
