"""The overlay `cpu` as containers, from images that are built here; tests are left out where that cannot be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.pods.cluster import Cluster
from tests.support.pods.images import build
from tests.support.pods.programs import unable

OVERLAY = "k8s/overlays/cpu"
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


@pytest.fixture(scope="session")
def deployed() -> Iterator[Deployed]:
    if why := unable():
        pytest.skip(why)
    begun = time.monotonic()
    cluster = Cluster(OVERLAY)
    base = build([workload.image for workload in cluster.workloads.values()])
    print(f"the images are built after {time.monotonic() - begun:.0f} s")
    begun = time.monotonic()
    with cluster:
        cluster.wait_until_ready(START_S)
        print(f"{len(cluster.pods)} pods are ready after {time.monotonic() - begun:.0f} s")
        yield Deployed(cluster, base)
