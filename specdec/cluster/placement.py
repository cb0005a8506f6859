"""The actors of one replica: what they ask of the cluster, on which nodes they come to be, and that they go together.

A replica is a placement group on one node: what its ranks say to each other in every layer must not cross a network.
That is the node with fewest of its role that has room, if Ray agrees, so that no node's loss takes all of a role: Ray's
own SPREAD goes round within a job, and every replica is a job. Not here: what runs in the actors (`rank_host`), how
long (`placed_replica`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from specdec.cluster.connection import first_sentence
from specdec.cluster.rank_host import RankHost
from specdec.errors import ResourceExhausted, Unavailable

#: What was taken by a replica that has just ended may take a moment to be free again.
PLACE_TIMEOUT_S = 20.0

#: For a node to start the actors' processes, once there is room.
_START_S = 120.0
#: For actors that can still be reached to end their processes.
_END_S = 2.0


@dataclass(frozen=True, slots=True)
class Needs:
    """What each rank asks of its node."""

    num_ranks: int
    num_cpus: float
    num_gpus: float

    @property
    def totals(self) -> tuple[float, float]:
        """CPUs and GPUs of all ranks."""
        return self.num_cpus * self.num_ranks, self.num_gpus * self.num_ranks

    def __str__(self) -> str:
        cpus, gpus = self.totals
        return f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "") + (" on one node" if self.num_ranks > 1 else "")


class Placement:
    """The actors of one life of a replica. Use it by `with`; they are placed once entered, and gone at the end."""

    def __init__(self, ray: Any, name: str, needs: Needs, timeout_s: float = PLACE_TIMEOUT_S) -> None:
        """
        Args:
            ray: connected.
            name: of the replica, its role and a number; dashboards show it.
            needs: of each rank.
            timeout_s: how long there may be no room.
        """
        self._ray, self._name, self._needs, self._timeout_s = ray, name, needs, timeout_s
        self._group: Any = None
        self.hosts: list[Any] = []
        """Handles of `RankHost`, by rank."""
        self.address = ""
        """Of the node of the first rank, and so of all."""
        self.free_port = 0
        """On that node, a moment ago."""

    def __enter__(self) -> Placement:
        """Raises ResourceExhausted where the cluster has no room, Unavailable where an actor cannot start."""
        try:
            self._place()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every actor and gives back what they took. Idempotent."""
        with contextlib.suppress(Exception):  # gone already, or Ray is
            self._ray.wait([host.end.remote() for host in self.hosts], num_returns=len(self.hosts), timeout=_END_S)
        for host in self.hosts:
            with contextlib.suppress(Exception):
                self._ray.kill(host)
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._group)
        self.hosts, self._group = [], None

    def _place(self) -> None:
        self._require_possible()
        bundle = {"CPU": self._needs.num_cpus, "GPU": self._needs.num_gpus}
        self._group = self._ray.util.placement_group(
            [{name: number for name, number in bundle.items() if number}] * self._needs.num_ranks,
            strategy="STRICT_PACK",
            name=f"specdec-{self._name}",
            _soft_target_node_id=self._best_node(),
        )
        if not self._group.wait(self._timeout_s):
            raise self._no_room()
        self.hosts = [self._start(rank) for rank in range(self._needs.num_ranks)]
        try:
            places = self._ray.get([host.place.remote() for host in self.hosts], timeout=_START_S)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            raise Unavailable(f"{self._name} cannot start on its node: {first_sentence(error)}") from error
        self.address, self.free_port = places[0]

    def _start(self, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        host = self._ray.remote(RankHost).options(
            name=f"specdec-{self._name}" + (f"-rank-{rank}" if self._needs.num_ranks > 1 else ""),
            num_cpus=self._needs.num_cpus,
            num_gpus=self._needs.num_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            max_concurrency=3,
            max_restarts=0,
        )
        return host.remote()

    def _best_node(self) -> str | None:
        """Of the nodes that have room, one with fewest replicas of the role; None where none has."""
        from ray._private import state

        role, _, number = self._name.rpartition("-")
        actors = [actor for actor in state.actors().values() if str(actor["Name"]).startswith(f"specdec-{role}-")]
        held = Counter(actor["Address"]["NodeID"] for actor in actors if actor["State"] == "ALIVE")
        cpus, gpus = self._needs.totals
        free = state.available_resources_per_node()
        nodes = sorted(node for node, has in free.items() if has.get("CPU", 0) >= cpus and has.get("GPU", 0) >= gpus)
        fewest = [node for node in nodes if held[node] == min(held[other] for other in nodes)]
        # Replicas that are placed in the same moment do not see each other.
        return fewest[int(number) % len(fewest)] if fewest else None

    def _require_possible(self) -> None:
        """Raises ResourceExhausted where even an empty cluster could not take the ranks: no wait is worth it."""
        sizes = [(node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0)) for node in self._ray.nodes()
                 if node["Alive"]]  # fmt: skip
        cpus, gpus = self._needs.totals
        if not any(size[0] >= cpus and size[1] >= gpus for size in sizes):
            most = max(sizes, key=lambda size: (size[1] >= gpus, size[0]), default=(0, 0))
            has = f"{most[0]:g} CPU" + (f" and {most[1]:g} GPU" if gpus else "")
            raise ResourceExhausted(
                f"{self._name} needs {self._needs}, the largest node of the Ray cluster has {has}",
                reason="QUOTA_EXCEEDED",
            )

    def _no_room(self) -> ResourceExhausted:
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        has = ", ".join(
            f"{total.get(name, 0):g} {name} of which {free.get(name, 0):g} are free"
            for name in ("CPU", "GPU") if name == "CPU" or self._needs.num_gpus
        )  # fmt: skip
        return ResourceExhausted(
            f"{self._name} needs {self._needs}, the Ray cluster has {has}", reason="QUOTA_EXCEEDED"
        )
