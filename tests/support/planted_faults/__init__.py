"""Faults of manifests, each one mutation of an overlay's rendered documents at a place that a generator chooses.

`python -m k8s.validate` must find each. `FAULTS` has them by name.
"""

from tests.support.planted_faults import autoscalers, metrics, pods, references, schemas, settings
from tests.support.planted_faults.overlay import FAULTS, Overlay

__all__ = ["FAULTS", "Overlay", "autoscalers", "metrics", "pods", "references", "schemas", "settings"]
