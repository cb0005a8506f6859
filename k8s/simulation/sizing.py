"""Compares the size of a plan with the smallest simulated system that holds the latencies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from coordinator.round.draft_deadline import LEAST_DEADLINE_S
from k8s.simulation.admission import slots_per_target
from k8s.simulation.cluster import Cluster
from k8s.simulation.pools import Workload
from k8s.simulation.traces import steady
from specdec.cli.planning.cards import CALLS, PlacedModel, card_of
from specdec.cli.planning.deployment import Deployment, ExpectedLoad
from specdec.cli.planning.search import best_deployment
from specdec.settings.coordinator import CoordinatorSettings
from specdec.settings.target import TargetSettings

#: Share of the requests that have to hold both limits, of those that come after the system has filled, and times.
HELD_SHARE = 0.99
FILLED_S, SECONDS = 20.0, 60.0
_SEED = 20


def workload_of(load: ExpectedLoad, alpha: float, deployment: Deployment) -> Workload:
    """Return the requests, models and costs of a planned system, with the defaults of the services."""
    return Workload(
        load, alpha, deployment, CALLS.coordinator_s,
        prefill_budget_s=TargetSettings.model_fields["prefill_budget_ms"].default / 1e3,
        draft_deadline_s=LEAST_DEADLINE_S,
        slots_per_target=slots_per_target(deployment, load, alpha),
        max_wait_s=CoordinatorSettings.model_fields["max_wait_s"].default,
    )  # fmt: skip


@dataclass(frozen=True)
class SizedLoad:
    """A load with the models that serve it."""

    load: ExpectedLoad
    target: PlacedModel
    draft: PlacedModel | None = None
    alpha: float = 0.0

    def plan(self) -> Deployment:
        """Return what `specdec plan` gives."""
        return best_deployment(self.load, self.alpha, self.target, self.draft)

    def least_gpus(self) -> int:
        """Return the GPUs of the smallest simulated system that holds the limits, with the gamma of the plan."""
        plan = self.plan()
        holds = cache(lambda num_gpus: any(self._holds(plan, *pools) for pools in self._pools(num_gpus)))
        num_gpus = plan.num_gpus
        while not holds(num_gpus):
            num_gpus += self.target.num_gpus if self.draft is None else 1
        while num_gpus > self.target.num_gpus:
            fewer = num_gpus - (self.target.num_gpus if self.draft is None else 1)
            if not holds(fewer):
                break
            num_gpus = fewer
        return num_gpus

    def _pools(self, num_gpus: int) -> Iterator[tuple[int, int]]:
        """Yield the numbers of targets and drafts that have this many GPUs together."""
        if self.draft is None:
            yield num_gpus // self.target.num_gpus, 0
            return
        for num_targets in range((num_gpus - 1) // self.target.num_gpus, 0, -1):
            num_drafts, rest = divmod(num_gpus - num_targets * self.target.num_gpus, self.draft.num_gpus)
            if not rest and num_drafts:
                yield num_targets, num_drafts

    def _holds(self, plan: Deployment, num_targets: int, num_drafts: int) -> bool:
        workload = workload_of(self.load, self.alpha, plan)
        replicas = {"target": num_targets, "draft": num_drafts, "coordinator": plan.num_coordinators(self.load)}
        history = Cluster(workload, replicas, {}, {}, _SEED).run(steady(self.load.rate_per_s, SECONDS))
        late = [each for each in history.served if each.arrived_s >= FILLED_S]
        num_held = sum(each.ttft_s <= self.load.ttft_s and each.tpot_s <= self.load.tpot_s for each in late)
        num_unserved = history.num_arrived - len(history.served)
        return num_held >= HELD_SHARE * (len(late) + num_unserved)


_H100 = card_of("h100")
LLAMA_1B = PlacedModel("llama-1b", 1_235_814_400, 16, 32_768, 2 * 1_235_814_400, _H100, 1, hidden_size=2048)
LLAMA_8B = PlacedModel("llama-8b", 8_030_261_248, 32, 131_072, 2 * 8_030_261_248, _H100, 1, hidden_size=4096)
LLAMA_70B = PlacedModel("llama-70b", 70_553_706_496, 80, 327_680, 2 * 70_553_706_496, _H100, 4, hidden_size=8192)

#: 50 requests a second of 1000 tokens in and 300 out, with 1 s to the first token. Names state the time of a token.
SIZED_LOADS = {
    "70B, 50 ms": SizedLoad(ExpectedLoad(50, 1000, 300, 1.0, 0.05), LLAMA_70B),
    "8B, 15 ms": SizedLoad(ExpectedLoad(50, 1000, 300, 1.0, 0.015), LLAMA_8B),
    "8B with 1B, 15 ms": SizedLoad(ExpectedLoad(50, 1000, 300, 1.0, 0.015), LLAMA_8B, LLAMA_1B, 0.8),
}
