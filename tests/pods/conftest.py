"""Overlays as containers, from images that are built here; tests are left out where that cannot be."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.pods.cluster import Cluster
from tests.support.pods.images import build
from tests.support.pods.programs import unable
from tests.support.pods.workloads import Secrets

#: Two processors load three models and start two coordinators.
START_S = 300.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("pods")


@dataclass
class Deployed:
    """The overlay's pods, all of which were ready, and the image that theirs are built upon."""

    cluster: Cluster
    base: str


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    with started("k8s/overlays/cpu") as found:
        yield found


@contextlib.contextmanager
def started(overlay: str, secrets: Secrets | None = None) -> Iterator[Deployed]:
    """Yield the pods of an overlay once all are ready. Only one overlay at a time can have pods."""
    if why := unable():
        pytest.skip(why)
    begun = time.monotonic()
    cluster = Cluster(overlay, secrets)
    base = build([workload.image for workload in cluster.workloads.values()])
    print(f"the images are built after {time.monotonic() - begun:.0f} s")
    begun = time.monotonic()
    with cluster:
        cluster.wait_until_ready(START_S)
        print(f"{len(cluster.pods)} pods are ready after {time.monotonic() - begun:.0f} s")
        yield Deployed(cluster, base)
