"""Runs a service module as a child that never outlives its parent: `python -P specdec/cli/child.py MODULE ARGS...`.

The parent holds the other end of this process's stdin. When it ends, however it ends (SIGKILL too), the pipe closes,
and the child drains as on SIGTERM, then goes. Works wherever pipes do, unlike PR_SET_PDEATHSIG, and needs no code
between fork and exec, which is unsafe in a parent with threads.

Run as a file and with -P, it does not look for modules in the folder it was started in, which others may write to.

Not here: what the service does; it sees its own `sys.argv` and `__main__`.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

_DRAIN_S = 5.0


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_DRAIN_S)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    del sys.argv[0]
    checkout = str(Path(__file__).resolve().parents[2])
    if checkout not in sys.path:  # nothing is installed
        sys.path.append(checkout)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
