"""Faults of manifests, each one mutation of an overlay's rendered documents at a place that a generator chooses.

`python -m k8s.validate` must find each. `FAULTS` has them by name, and `OPERATOR_FAULTS` those of workloads that
operators run.
"""

from tests.support.planted_faults import autoscalers, metrics, pods, references, schemas, settings
from tests.support.planted_faults.operators import OPERATED, OPERATOR_FAULTS
from tests.support.planted_faults.overlay import FAULTS, Overlay

__all__ = [
    "FAULTS",
    "OPERATED",
    "OPERATOR_FAULTS",
    "Overlay",
    "autoscalers",
    "metrics",
    "pods",
    "references",
    "schemas",
    "settings",
]
