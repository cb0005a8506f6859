"""Writes a deployment as a kustomize component: sizes of the pools, GPUs of a replica, and the plan beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.contract.errors import InvalidRequest

#: An autoscaler may double a pool, for a load above the planned one.
_ROOM = 2


def write_overlay(
    directory: Path, replicas: Mapping[str, int], gpus: Mapping[str, int], plan: Mapping[str, Any]
) -> None:
    """Write kustomization.yaml and plan.json into a new folder; both or none.

    Args:
        directory: the folder.
        replicas: planned number of replicas by the name of the Deployment.
        gpus: GPUs of each replica, of the pools that have any.
        plan: what `specdec plan --json` prints.

    Raises:
        InvalidRequest: the folder holds files already.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidRequest(f"--write: {directory} exists and is not an empty folder", field="write")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "kustomization.yaml").write_text(_component(replicas, gpus), encoding="utf-8")
    (directory / "plan.json").write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")


def _component(replicas: Mapping[str, int], gpus: Mapping[str, int]) -> str:
    """Return the component. Patches of objects that an overlay does not have change nothing."""
    lines = [
        "# Sizes by `specdec plan`, calculated from the load in plan.json beside this file. Name this folder under",
        "# `components` of an overlay.",
        "apiVersion: kustomize.config.k8s.io/v1alpha1",
        "kind: Component",
        "patches:",
    ]
    for name, count in replicas.items():
        lines += [
            f"  - target: {{ kind: HorizontalPodAutoscaler, name: {name} }}",
            "    patch: |-",
            f"      - {{ op: replace, path: /spec/minReplicas, value: {count} }}",
            f"      - {{ op: replace, path: /spec/maxReplicas, value: {_ROOM * count} }}",
        ]
    for name, count in gpus.items():
        ranks = f"{{ name: SPECDEC_{name.upper()}__TENSOR_PARALLEL, value: '{count}' }}"
        resource = "/spec/template/spec/containers/0/resources/limits/nvidia.com~1gpu"
        lines += [
            f"  - target: {{ kind: Deployment, name: {name} }}",
            "    patch: |-",
            f"      - {{ op: add, path: {resource}, value: {count} }}",
            f"      - {{ op: add, path: /spec/template/spec/containers/0/env/-, value: {ranks} }}",
        ]
    return "\n".join(lines) + "\n"
