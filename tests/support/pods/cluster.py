"""A cluster of one machine: the workloads of an overlay as pods on one network, rolled as a Deployment is.

    with Cluster("k8s/overlays/cpu") as cluster:
        cluster.wait_until_ready(300.0)
        cluster.roll("target")

Within the pods, a Service's name resolves to all of its running pods. A real Service leaves out pods that are not ready
or that are ending. Only Redis is found by such a name.
"""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from .pod import Pod, remove_all
from .programs import ProgramFailed, podman
from .workloads import Secrets, Workload, read

NETWORK = "specdec-pods"
_SUBNET = "10.89.77"
#: Podman lets this machine forward packets, which a network without a way out does not need.
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_LOOK_S = 0.2


class Cluster:
    """Pods of all workloads, from entering until leaving."""

    def __init__(self, overlay: str, secrets: Secrets | None = None) -> None:
        """`secrets`: contents of the Secrets that the operator makes, by their names."""
        self.workloads = {workload.name: workload for workload in read(overlay, secrets or {})}
        self.pods: list[Pod] = []
        self._numbers = itertools.count(10)
        self._forwards = _FORWARDING.read_text()

    def __enter__(self) -> Self:
        remove_all()
        podman("network", "rm", "--force", NETWORK)
        podman("network", "create", "--internal", "--subnet", f"{_SUBNET}.0/24", NETWORK)
        try:
            for workload in self.workloads.values():
                for _ in range(workload.num_replicas):
                    self._start(workload)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def pods_of(self, name: str) -> list[Pod]:
        """Return the pods of a workload that are not ending, the oldest one first."""
        return [pod for pod in self.pods if pod.workload.name == name]

    def addresses(self, name: str) -> list[str]:
        """Return the addresses of a workload's ready pods: what the name of its headless Service resolves to."""
        return [pod.address for pod in self.pods_of(name) if pod.is_ready]

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return once all pods are ready. Raises TimeoutError with the logs of those that are not."""
        self._wait(self.pods, timeout_s)

    def roll(self, name: str, timeout_s: float = 600.0) -> list[Pod]:
        """Replace the pods of a Deployment within its surge and its unavailable ones. Return the ended pods."""
        workload, old = self.workloads[name], self.pods_of(name)
        most = workload.num_replicas + workload.rolling("maxSurge")
        least = workload.num_replicas - workload.rolling("maxUnavailable")
        ends: list[threading.Thread] = []
        new: list[Pod] = []
        for leaving in old:
            while len(new) < workload.num_replicas and len(self.pods_of(name)) < most:
                new.append(self._start(workload))
            if sum(pod.is_ready for pod in self.pods_of(name)) - 1 < least:
                self._wait(new, timeout_s)
            self.pods.remove(leaving)
            ends.append(threading.Thread(target=leaving.end, name=f"end of {leaving.name}"))
            ends[-1].start()
        for thread in ends:
            thread.join()
        self._wait(new, timeout_s)
        return old

    def scale(self, name: str, num_replicas: int) -> None:
        """Start pods of a workload, or end its newest ones, until it has this number."""
        pods = self.pods_of(name)
        for _ in range(num_replicas - len(pods)):
            self._start(self.workloads[name])
        for leaving in pods[num_replicas:]:
            self.pods.remove(leaving)
            leaving.end()

    def kill(self, pod_name: str) -> None:
        """Remove a pod at once and start another one in its place."""
        (lost,) = [pod for pod in self.pods if pod.name == pod_name]
        self.pods.remove(lost)
        lost.kill()
        self._start(lost.workload)

    def _start(self, workload: Workload) -> Pod:
        number = next(self._numbers)
        pod = Pod(workload, f"{workload.name}-{number}", f"{_SUBNET}.{number}")
        self.pods.append(pod)
        pod.start(NETWORK)
        return pod

    def _wait(self, pods: list[Pod], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while late := [pod for pod in pods if not pod.is_ready]:
            if time.monotonic() > end:
                logs = "\n".join(f"{pod.name}:\n{pod.logs()}" for pod in late)
                raise TimeoutError(f"not ready within {timeout_s} s: {logs}")
            time.sleep(_LOOK_S)

    def _remove(self) -> None:
        for pod in self.pods:
            try:
                pod.kill()
            except ProgramFailed as error:
                print(f"{pod.name} is left: {error}")
        podman("network", "rm", "--force", NETWORK)
        _FORWARDING.write_text(self._forwards)
