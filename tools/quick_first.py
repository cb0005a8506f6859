"""A pytest plugin of `make mutants`: the tests that took least, as mutmut wrote it down, run first.

A mutant's tests end with the first that fails, and most mutants are killed by any of many. Loaded by `-p`, see
pyproject.toml.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

STATS = Path("mutmut-stats.json")  # pytest runs inside the mutants' folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if STATS.exists():
        took_s = json.loads(STATS.read_text())["duration_by_test"]
        items.sort(key=lambda item: took_s.get(item.nodeid, 0.0))
