"""One pod: a container of podman with the network, the user, the limits and the volumes of its manifest.

A thread asks the probes and restarts the container as a kubelet does, from `start` until the pod is ended; it does not
wait longer where a process ends again and again. Enforced by the kernel: user, capabilities, seccomp, a read-only root,
the limit of memory, the pod's network. Not enforced: network policies, requests of processor time, and `fsGroup`, which
podman 4.3 leaves out: a volume has the owner of the image's folder.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from .probes import Probe, probe_of
from .programs import ProgramFailed, podman
from .workloads import Workload

#: Pause between two looks at the probes that are due.
_LOOK_S = 0.2


class Pod:
    """A pod with one container."""

    def __init__(self, workload: Workload, name: str, address: str) -> None:
        self.workload, self.name, self.address = workload, name, address
        self.is_ready = False
        self.num_restarts = 0
        self.exit_status: int | None = None
        """Status that the process ended with when the pod was ended; None before."""
        self._ending = threading.Event()
        self._watch = threading.Thread(target=self._keep, name=f"kubelet of {name}", daemon=True)

    @property
    def container(self) -> str:
        """Name of the container in podman."""
        return f"{self.name}-{self.workload.container['name']}"

    @property
    def pid(self) -> int:
        """Number of the container's first process on this machine."""
        return int(self.inspect("{{.State.Pid}}"))

    def start(self, network: str) -> None:
        """Start the container on a network, where the names of its Services lead to it, and the watch over it."""
        names = "".join(f",alias={name}" for name in self.workload.service_names)
        manifest = json.dumps(self.workload.manifest(self.name, self.address))
        podman("kube", "play", "--network", f"{network}:ip={self.address}{names}", "-", text=manifest)
        self._watch.start()

    def end(self) -> None:
        """End the pod as a cluster does: the hook's sleep, SIGTERM, and SIGKILL once the grace has passed."""
        self._stop_watching()
        time.sleep(self.workload.pre_stop_s)
        podman("stop", "--time", str(int(self.workload.grace_s - self.workload.pre_stop_s)), self.container)
        self.exit_status = int(self.inspect("{{.State.ExitCode}}"))
        podman("pod", "rm", "--force", self.name)

    def kill(self) -> None:
        """Remove the pod at once, whatever it does."""
        self._stop_watching()
        podman("pod", "rm", "--force", "--time", "0", self.name)

    def execute(self, command: list[str], timeout_s: float = 60.0) -> str:
        """Return what a command in the container prints. Raises ProgramFailed."""
        return podman("exec", self.container, *command, timeout_s=timeout_s)

    def inspect(self, template: str) -> str:
        """Return what podman knows about the container, in a template of its own."""
        return podman("inspect", "--type", "container", "--format", template, self.container).strip()

    def changed_paths(self) -> list[str]:
        """Return the paths of the root filesystem that differ from the image's."""
        changes = json.loads(podman("diff", "--format", "json", self.container))
        return sorted(path for paths in changes.values() for path in paths)

    def logs(self) -> str:
        """Return the last lines that the process wrote."""
        return podman("logs", "--tail", "40", self.container, with_errors=True)

    def _stop_watching(self) -> None:
        self.is_ready = False
        self._ending.set()
        if self._watch.is_alive():
            self._watch.join()

    def _keep(self) -> None:
        while not self._ending.is_set():
            grace_s = self._watch_one_life()
            if not self._ending.is_set():
                self._restart(grace_s)

    def _watch_one_life(self) -> float:
        """Ask the probes until one wants a restart, or the process or the pod ends. Return the grace of a restart."""
        process = Path(f"/proc/{self.pid}")
        startup, readiness, liveness = (self._probe(f"{kind}Probe") for kind in ("startup", "readiness", "liveness"))
        while not self._ending.wait(_LOOK_S) and process.exists():
            if startup is not None:
                passed = startup.poll()
                if passed is False:
                    return self.workload.restart_grace_s("startupProbe")
                startup = None if passed else startup
                continue
            if readiness is not None and (passed := readiness.poll()) is not None:
                self.is_ready = passed and not self._ending.is_set()
            if liveness is not None and liveness.poll() is False:
                return self.workload.restart_grace_s("livenessProbe")
        return self.workload.grace_s

    def _restart(self, grace_s: float) -> None:
        """Start the container again. The pod keeps its address and its volumes."""
        self.is_ready = False
        podman("restart", "--time", str(int(grace_s)), self.container)
        self.num_restarts += 1

    def _probe(self, field: str) -> Probe | None:
        container = self.workload.container
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        return probe_of(container.get(field), self.address, self.execute, ports)


def remove_all() -> None:
    """Remove the pods and volumes that a run which was cut off has left."""
    try:
        podman("pod", "rm", "--all", "--force", "--time", "0")
        podman("volume", "prune", "--force")
    except ProgramFailed as error:
        raise ProgramFailed(f"pods of an earlier run are still there: {error}") from error
