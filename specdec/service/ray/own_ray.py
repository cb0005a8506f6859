"""Runs a Ray cluster on this machine while `specdec up --ray-address local` runs.

`python -m specdec.service.ray.own_ray` logs the address of the cluster and waits for SIGTERM. The files of the
cluster lie in a folder that is removed at the end. It has no dashboard; `ray start` starts clusters with one.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import threading

from specdec.contract.errors import SpecdecError, Unavailable, error_line
from specdec.service.ray.cluster_connection import first_sentence, import_ray, seclude

#: Parent of the cluster's folder. Paths of sockets have a low limit, and Ray's add sixty characters to it.
_FOLDER = "/tmp"


def main() -> int:
    """Run until SIGTERM; return the exit code."""
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
    except Exception as error:  # Ray documents no exception types
        print(error_line(Unavailable(f"cannot start Ray on this machine: {first_sentence(error)}")), file=say)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
