"""Writes a plan as a kustomize component: sizes and thresholds of autoscalers, and GPUs of replicas.

Both kinds of autoscalers of k8s/components are patched, HorizontalPodAutoscalers and KEDA's ScaledObjects. A patch of
an object that an overlay does not have changes nothing. The signals whose thresholds depend on the models are calls in
a target and in a draft, and streams of a coordinator; those of queues, KV and processor time stay.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.cli.planning.deployment import Deployment, ExpectedLoad, coordinator_cores
from specdec.cli.planning.search import state_within_limits
from specdec.cli.planning.steady_state import SteadyState
from specdec.contract.errors import InvalidRequest

#: Share of the largest load of a deployment at which autoscalers add replicas: the rest is for the time until these
#: serve.
SCALED_SHARE = 0.8
#: An autoscaler may double a pool, for a load above the planned one.
_ROOM = 2
_NUM_HALVINGS = 12


@dataclass(frozen=True, slots=True)
class Threshold:
    """A signal of an autoscaler, and its value at which a replica has enough to do."""

    value: float
    metric_index: int
    """Place among the metrics of the HorizontalPodAutoscaler."""
    metric: str
    trigger_index: int
    """Place among the triggers of the ScaledObject."""
    trigger: str


def thresholds(load: ExpectedLoad, alpha: float, deployment: Deployment) -> dict[str, Threshold]:
    """Return the threshold of each pool: the signal of one replica at `SCALED_SHARE` of the largest load.

    Args:
        load: the planned load.
        alpha: acceptance rate of the draft.
        deployment: the plan for it.
    """
    scaled, state = _scaled_load(load, alpha, deployment)
    root = math.sqrt(state.target_calls / deployment.num_targets)
    streams = state.num_streams / coordinator_cores(scaled, deployment.core_share)
    found = {
        "target": Threshold(root, 0, "specdec_calls_root", 0, "calls"),
        "coordinator": Threshold(streams, 1, "specdec_num_requests_running", 1, "streams"),
    }
    if deployment.draft is not None:
        found["draft"] = Threshold(state.draft_calls / deployment.num_drafts, 0, "specdec_calls", 1, "calls")
    return found


def _scaled_load(load: ExpectedLoad, alpha: float, deployment: Deployment) -> tuple[ExpectedLoad, SteadyState]:
    def at(factor: float) -> ExpectedLoad:
        return replace(load, rate_per_s=load.rate_per_s * factor, peak_factor=1.0)

    low, high = load.peak_factor, 2.0 * load.peak_factor
    while state_within_limits(at(high), alpha, deployment) is not None:
        low, high = high, 2.0 * high
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if state_within_limits(at(middle), alpha, deployment) is not None else (low, middle)
    scaled = at(SCALED_SHARE * low)
    state = state_within_limits(scaled, alpha, deployment)
    assert state is not None, "a smaller load holds the limits, too"
    return scaled, state


def write_overlay(
    directory: Path,
    replicas: Mapping[str, int],
    gpus: Mapping[str, int],
    signals: Mapping[str, Threshold],
    plan: Mapping[str, Any],
) -> None:
    """Write kustomization.yaml and plan.json into a new folder; both or none.

    Args:
        directory: the folder.
        replicas: planned number of replicas by the name of the Deployment.
        gpus: GPUs of each replica, of the pools that have any.
        signals: thresholds of the autoscalers by the name of the Deployment.
        plan: what `specdec plan --json` prints.

    Raises:
        InvalidRequest: the folder holds files already.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidRequest(f"--write: {directory} exists and is not an empty folder", field="write")
    directory.mkdir(parents=True, exist_ok=True)
    lines = [*_HEAD, *_autoscalers(replicas, signals), *_deployments(gpus)]
    (directory / "kustomization.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (directory / "plan.json").write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")


_HEAD = (
    "# Sizes by `specdec plan`, calculated from the load in plan.json beside this file. Name this folder under",
    "# `components` of an overlay, after `hpa` or `keda`. An autoscaler that has other signals than theirs is refused.",
    "apiVersion: kustomize.config.k8s.io/v1alpha1",
    "kind: Component",
    "patches:",
)


def _autoscalers(replicas: Mapping[str, int], signals: Mapping[str, Threshold]) -> Iterator[str]:
    for name, count in replicas.items():
        signal, most = signals[name], _ROOM * count
        metric = f"/spec/metrics/{signal.metric_index}/pods"
        yield f"  - target: {{ kind: HorizontalPodAutoscaler, name: {name} }}"
        yield "    patch: |-"
        yield from _operations(
            ("replace", "/spec/minReplicas", count),
            ("replace", "/spec/maxReplicas", most),
            ("test", f"{metric}/metric/name", signal.metric),
            ("replace", f"{metric}/target/averageValue", f"{max(1, round(signal.value * 1000))}m"),
        )
        trigger = f"/spec/triggers/{signal.trigger_index}"
        yield f"  - target: {{ kind: ScaledObject, name: {name} }}"
        yield "    patch: |-"
        if name != "draft":  # KEDA starts drafts from zero
            yield from _operations(("replace", "/spec/minReplicaCount", count))
        yield from _operations(
            ("replace", "/spec/maxReplicaCount", most),
            ("test", f"{trigger}/name", signal.trigger),
            ("replace", f"{trigger}/metadata/threshold", f"'{max(0.001, signal.value):.3f}'"),
        )


def _deployments(gpus: Mapping[str, int]) -> Iterator[str]:
    for name, count in gpus.items():
        yield f"  - target: {{ kind: Deployment, name: {name} }}"
        yield "    patch: |-"
        ranks = f"{{ name: SPECDEC_{name.upper()}__TENSOR_PARALLEL, value: '{count}' }}"
        yield from _operations(
            ("add", "/spec/template/spec/containers/0/resources/limits/nvidia.com~1gpu", count),
            ("add", "/spec/template/spec/containers/0/env/-", ranks),
        )


def _operations(*operations: tuple[str, str, int | str]) -> Iterator[str]:
    for operation, path, value in operations:
        yield f"      - {{ op: {operation}, path: {path}, value: {value} }}"
