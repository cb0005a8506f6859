"""A Ray of our own on this machine, for as long as `specdec up --ray-address local` runs.

`python -m specdec.cluster.own_ray` says where it is and waits for SIGTERM. Its files lie in a folder of their own,
which goes with it. It has no dashboard: a cluster that is to have one is started with `ray start`. Not here: anything
that runs on it.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import threading

from specdec.cluster.connection import first_sentence, import_ray, seclude
from specdec.errors import SpecdecError, Unavailable, error_line

#: Sockets lie some sixty characters below it, and their paths are short everywhere.
_FOLDER = "/tmp"


def main() -> int:
    """Runs until SIGTERM; returns the exit code."""
    say = seclude()
    folder = tempfile.mkdtemp(prefix="specdec-ray-", dir=_FOLDER)
    try:
        ray = import_ray()
        try:
            context = ray.init(
                address="local", include_dashboard=False, log_to_driver=False, configure_logging=False,
                _temp_dir=folder,
            )  # fmt: skip
            ended = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: ended.set())
            record = {"level": "info", "message": "listening", "advertised": context.address_info["address"]}
            print(json.dumps(record), file=say, flush=True)
            ended.wait()
        finally:
            ray.shutdown()
    except SpecdecError as error:
        print(error_line(error), file=say)
        return 1
    except Exception as error:  # Ray raises whatever it likes
        print(error_line(Unavailable(f"no Ray can be started here: {first_sentence(error)}")), file=say)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
