"""Faults of manifests, each one mutation of an overlay's rendered documents at a place that a generator chooses.

`python -m k8s.validate` must find each. `FAULTS` has them by name, `OPERATOR_FAULTS` those of workloads that operators
run, and `SHARED_FAULTS` those of names and numbers that two objects share.
"""

from tests.support.planted_faults import (
    autoscalers,
    connections,
    metrics,
    pods,
    probing,
    references,
    schemas,
    settings,
    sharing,
    sizes,
)
from tests.support.planted_faults.operators import OPERATED, OPERATOR_FAULTS
from tests.support.planted_faults.overlay import FAULTS, Overlay
from tests.support.planted_faults.shared import COMPOSITIONS, SHARED_FAULTS

__all__ = [
    "COMPOSITIONS",
    "FAULTS",
    "OPERATED",
    "OPERATOR_FAULTS",
    "SHARED_FAULTS",
    "Overlay",
    "autoscalers",
    "connections",
    "metrics",
    "pods",
    "probing",
    "references",
    "schemas",
    "settings",
    "sharing",
    "sizes",
]
