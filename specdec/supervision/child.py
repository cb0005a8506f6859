"""Runs a service module as a child process that never outlives its parent.

    python -P -m specdec.supervision.child MODULE ARGS...

The parent holds the other end of this process's stdin. When the parent ends, by SIGKILL too, the pipe closes; then the
child drains as on SIGTERM and exits. This works wherever pipes do, unlike PR_SET_PDEATHSIG, and needs no code between
fork and exec, which is unsafe in a parent with threads. The service sees its own `sys.argv` and `__main__`.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

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
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
