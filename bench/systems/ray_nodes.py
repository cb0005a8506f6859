"""A Ray cluster of three nodes on this machine: `python -m bench.systems.ray_nodes`, in a process of its own.

Ray takes over signals and outputs of the process that starts it, so tests hold it by a pipe: `RayNodes`. The head
offers no CPUs; each of the two other nodes has four.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from bench.harness.line_child import LineChild
from bench.harness.process_tree import descendants

NUM_CPUS = 4


class RayNodes:
    """A cluster that runs while the context is open and leaves no process or file behind."""

    def __enter__(self) -> Self:
        self._folder = tempfile.mkdtemp(prefix="specdec-nodes-", dir="/tmp")  # paths of sockets are short
        self.environ = {"RAY_TMPDIR": self._folder, "RAY_AUTH_MODE": "disabled"}
        self._child = LineChild("bench.systems.ray_nodes", environ=self.environ)
        self.address: str = self._child.greeting["address"]
        self.raylets: list[int] = self._child.greeting["raylets"]
        """Process ids of the live nodes that take replicas."""
        return self

    def __exit__(self, *_: object) -> None:
        self._child.__exit__()
        shutil.rmtree(self._folder, ignore_errors=True)

    def free_cpus(self) -> float:
        """Return the number of CPUs that no actor holds."""
        return float(self._child.ask(None)["free_cpus"])

    def node_of(self, pid: int) -> int:
        """Index in `raylets` of the node that a process runs on."""
        (index,) = [index for index, raylet in enumerate(self.raylets) if pid in descendants(raylet)]
        return index

    def kill(self, index: int) -> None:
        """Kill a node and every process on it."""
        raylet = self.raylets.pop(index)
        lost = [raylet, *descendants(raylet)]
        for pid in lost:  # stop all of them first, so that none reacts while the others are being killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        for pid in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start_cluster() -> tuple[Any, list[Any]]:
    """Ray gives a node 30 s to start, which a busy machine may exceed: it is tried again."""
    from ray.cluster_utils import Cluster

    head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False}
    for tries_left in (2, 1, 0):
        cluster = Cluster()
        try:
            cluster.add_node(**head)
            nodes = [cluster.add_node(num_cpus=NUM_CPUS) for _ in range(2)]
            return cluster, nodes
        except Exception:
            if not tries_left:
                raise
            with contextlib.suppress(Exception):
                cluster.shutdown()
            end_descendants()
    raise AssertionError


def end_descendants() -> None:
    """Kills all processes below this one."""
    while [pid for pid in descendants(os.getpid()) if Path(f"/proc/{pid}").exists()]:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import ray

    cluster, nodes = start_cluster()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), file=out)
    for _ in sys.stdin:
        print(json.dumps({"free_cpus": ray.available_resources().get("CPU", 0.0)}), file=out)
    ray.shutdown()
    with contextlib.suppress(Exception):  # a node that was killed
        cluster.shutdown()
    end_descendants()


if __name__ == "__main__":
    main()
