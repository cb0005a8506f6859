"""Reads the autoscalers of k8s/components: signals with their queries and targets, limits, windows and policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ROOT / "k8s" / "components"
#: Behaviour of an autoscaler whose manifest leaves it out, by the reference of HorizontalPodAutoscaler v2.
_DEFAULT_UP = {
    "stabilizationWindowSeconds": 0,
    "policies": [
        {"type": "Percent", "value": 100, "periodSeconds": 15},
        {"type": "Pods", "value": 4, "periodSeconds": 15},
    ],
}
_DEFAULT_DOWN = {
    "stabilizationWindowSeconds": 300,
    "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
}
_EXPONENTS = {"m": "e-3", "k": "e3", "M": "e6", "": ""}


@dataclass(frozen=True, slots=True)
class Signal:
    """One metric of an autoscaler. The desired number of replicas is its sum over the pods, divided by the target."""

    name: str
    query: str
    """PromQL. Its values are added up."""
    target: float
    """Value that each replica is to have on average."""
    activation: float = 0.0
    """Value above which KEDA starts a pool that has no replicas."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Largest change within a period."""

    is_percent: bool
    value: float
    period_s: float


@dataclass(frozen=True, slots=True)
class Direction:
    """Behaviour of scaling up or down."""

    window_s: float
    policies: tuple[Policy, ...]


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """One autoscaler as its manifest describes it."""

    pool: str
    least: int
    most: int
    signals: tuple[Signal, ...]
    up: Direction
    down: Direction
    cooldown_s: float | None = None
    """Time without activity after which KEDA stops the last replica; None: an autoscaler that has no zero."""


def hpa_autoscalers(folder: Path = COMPONENTS / "hpa") -> dict[str, Autoscaler]:
    """Return the HorizontalPodAutoscalers by pool, with the queries of the adapter's rules."""
    rules = _adapter_queries(folder / "adapter" / "rules.yaml")
    found = (_hpa(body, rules) for path in sorted(folder.glob("*/autoscaler.yaml")) for body in _documents(path))
    return {each.pool: each for each in found}


def keda_autoscalers(path: Path = COMPONENTS / "keda" / "scalers.yaml") -> dict[str, Autoscaler]:
    """Return the ScaledObjects by pool."""
    return {each.pool: each for each in map(_scaled_object, _documents(path))}


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    return (body for body in yaml.safe_load_all(path.read_text()) if body)


def _adapter_queries(path: Path) -> dict[str, str]:
    """Return the query template of each metric that prometheus-adapter makes."""
    (config,) = _documents(path)
    rules = yaml.safe_load(config["data"]["config.yaml"])
    return {
        rule["name"]["as"]: str(rule["metricsQuery"])
        for part in ("rules", "externalRules")
        for rule in rules.get(part) or ()
    }


def _hpa(body: dict[str, Any], rules: dict[str, str]) -> Autoscaler:
    spec = body["spec"]
    pool = spec["scaleTargetRef"]["name"]
    signals = tuple(_signal(metric, pool, rules) for metric in spec["metrics"])
    up, down = _directions(spec.get("behavior") or {})
    return Autoscaler(pool, spec["minReplicas"], spec["maxReplicas"], signals, up, down)


def _signal(entry: dict[str, Any], pool: str, rules: dict[str, str]) -> Signal:
    """Return the signal of a metric. For one of pods, the adapter selects the series of the Deployment's pods."""
    kind = entry["type"].lower()
    metric = entry[kind]
    name = metric["metric"]["name"]
    matchers = f'deployment="{pool}"' if kind == "pods" else ""
    query = rules[name].replace("<<.LabelMatchers>>", matchers)
    return Signal(name, query, quantity(metric["target"]["averageValue"]))


def _scaled_object(body: dict[str, Any]) -> Autoscaler:
    spec = body["spec"]
    advanced = (spec.get("advanced") or {}).get("horizontalPodAutoscalerConfig") or {}
    up, down = _directions(advanced.get("behavior") or {})
    signals = tuple(_trigger_signal(trigger) for trigger in spec["triggers"])
    return Autoscaler(
        spec["scaleTargetRef"]["name"], spec["minReplicaCount"], spec["maxReplicaCount"], signals, up, down,
        cooldown_s=float(spec["cooldownPeriod"]),
    )  # fmt: skip


def _trigger_signal(trigger: dict[str, Any]) -> Signal:
    metadata = trigger["metadata"]
    activation = float(metadata.get("activationThreshold", 0))
    return Signal(trigger["name"], str(metadata["query"]), float(metadata["threshold"]), activation)


def _directions(behavior: dict[str, Any]) -> tuple[Direction, Direction]:
    up = _direction({**_DEFAULT_UP, **(behavior.get("scaleUp") or {})})
    return up, _direction({**_DEFAULT_DOWN, **(behavior.get("scaleDown") or {})})


def _direction(body: dict[str, Any]) -> Direction:
    policies = tuple(
        Policy(each["type"] == "Percent", float(each["value"]), float(each["periodSeconds"]))
        for each in body["policies"]
    )
    return Direction(float(body["stabilizationWindowSeconds"]), policies)


def quantity(text: str) -> float:
    """Return the value of a quantity of Kubernetes, such as `700m`."""
    number = str(text).rstrip("mkM")
    return float(f"{number}{_EXPONENTS[str(text)[len(number) :]]}")
