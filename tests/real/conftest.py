"""SmolLM2 and Gemma 3 as their packages bring them; a model is loaded when its first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.systems.real_models import GEMMA3, SMOLLM2
from tests.support.served_files import Served, serve


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("real")


@pytest.fixture(scope="session")
def smol() -> Iterator[Served]:
    with serve(SMOLLM2.path()) as served:
        yield served


@pytest.fixture(scope="session")
def gemma() -> Iterator[Served]:
    with serve(GEMMA3.path()) as served:
        yield served
