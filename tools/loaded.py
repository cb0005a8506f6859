"""Run a command while the machine has a high load: `python -m tools.loaded LOAD COMMAND...`.

Failure and end-to-end tests must pass on a machine with five times the load (`make test-loaded`): busy processes take
the place of neighbours, and every wait in the tests has to hold without the processor that it expects. A busy process
pauses while other processes, for instance another run of the tests, already keep the load there.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

#: A process that computes while at most argv[1] processes of the machine want to run. It ends with its parent, whose
#: end of the pipe closes.
_BUSY = """
import sys, threading, time
load = int(sys.argv[1])
threading.Thread(target=sys.stdin.read).start()
while threading.active_count() > 1:
    num_runnable = int(open("/proc/loadavg").read().split()[3].partition("/")[0])
    if num_runnable > load:
        time.sleep(0.1)
    else:
        end_s = time.monotonic() + 0.02
        while time.monotonic() < end_s:
            pass
"""


@contextlib.contextmanager
def busy_processes(load: int) -> Iterator[None]:
    """Keep about `load` processes of the machine runnable: those that run anyway, and busy ones of this context."""
    with contextlib.ExitStack() as stack:
        for _ in range(load):
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", _BUSY, str(load)], stdin=subprocess.PIPE)
            )
            stack.callback(process.kill)
        yield


def main() -> int:
    load, *command = sys.argv[1:]
    with busy_processes(int(load)):
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
