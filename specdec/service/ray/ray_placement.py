"""Places the actors of one replica on a node of a Ray cluster, and removes them together.

A replica is a placement group on one node, because its ranks exchange messages in every layer, which must not cross a
network. This module prefers the node with room that has the fewest replicas of the same role, so that the loss of one
node does not take all replicas of a role. Ray's own SPREAD works within one job only, and every replica is a job.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from specdec.contract.errors import ResourceExhausted, Unavailable
from specdec.service.ray.cluster_connection import first_sentence
from specdec.service.ray.rank_host import RankHost

#: Time to wait for room: the resources of a replica that has just ended are free a little later.
PLACE_TIMEOUT_S = 20.0

#: Time in which a node must start the actors' processes, once it has room.
_START_S = 120.0
#: Time that reachable actors get to end their processes.
_END_S = 2.0


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources that each rank requests from its node."""

    num_ranks: int
    num_cpus: float
    num_gpus: float

    @property
    def totals(self) -> tuple[float, float]:
        """CPUs and GPUs of all ranks together."""
        return self.num_cpus * self.num_ranks, self.num_gpus * self.num_ranks

    def __str__(self) -> str:
        cpus, gpus = self.totals
        return f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "") + (" on one node" if self.num_ranks > 1 else "")


class RayPlacement:
    """The actors of a replica: entering the context places them, leaving it removes them."""

    def __init__(self, ray: Any, name: str, needs: Needs, timeout_s: float = PLACE_TIMEOUT_S) -> None:
        """
        Args:
            ray: the package ray, connected.
            name: name of the replica, ROLE-NUMBER; dashboards show it.
            needs: resources of each rank.
            timeout_s: time to wait for room.
        """
        self._ray, self._name, self._needs, self._timeout_s = ray, name, needs, timeout_s
        self._group: Any = None
        self.hosts: list[Any] = []
        """Handles of `RankHost`, by rank."""
        self.address = ""
        """Address of the node, which is the same for all ranks."""
        self.free_port = 0
        """Port that was free on that node when the first actor started."""

    def __enter__(self) -> RayPlacement:
        """Raises ResourceExhausted if the cluster has no room, Unavailable if an actor cannot start."""
        try:
            self._place()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every actor and release its resources. Idempotent."""
        with contextlib.suppress(Exception):  # the actors or Ray have ended already
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
        """Return the id of a node with room that has the fewest replicas of the role; None if no node has room."""
        from ray._private import state

        role, _, number = self._name.rpartition("-")
        actors = [actor for actor in state.actors().values() if str(actor["Name"]).startswith(f"specdec-{role}-")]
        held = Counter(actor["Address"]["NodeID"] for actor in actors if actor["State"] == "ALIVE")
        cpus, gpus = self._needs.totals
        free = state.available_resources_per_node()
        nodes = sorted(node for node, has in free.items() if has.get("CPU", 0) >= cpus and has.get("GPU", 0) >= gpus)
        fewest = [node for node in nodes if held[node] == min(held[other] for other in nodes)]
        # Replicas that are placed at the same time do not see each other, so their numbers spread them.
        return fewest[int(number) % len(fewest)] if fewest else None

    def _require_possible(self) -> None:
        """Raises ResourceExhausted if even an empty cluster could not hold the ranks, so that waiting is useless."""
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
