"""Learning logs in tests: opened, and read back. Called by tests of what is logged and of what is made of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from coordinator.learning.log import LearningLog
from specdec.learning.log_files import LogFacts, LoggedTurn, read_segment, tenant_folder


class CountedLog(LearningLog):
    """A learning log that keeps its own counters."""

    def __init__(self, folder: Path, tenant: str = "default", **options: Any) -> None:
        self.counts: Counter[str] = Counter()
        limits = {"max_bytes": 1 << 30, "max_age_s": 3600.0}
        super().__init__(folder, tenant=tenant, count=self._add, **(limits | options))

    def _add(self, outcome: str, num_tokens: int) -> None:
        self.counts[outcome] += num_tokens


def logged(folder: Path, tenant: str = "default") -> tuple[set[LogFacts], list[LoggedTurn]]:
    """All that is in a tenant's log."""
    segments = [read_segment(path) for path in sorted(tenant_folder(folder, tenant).glob("*.safetensors"))]
    return {facts for facts, _ in segments}, [turn for _, turns in segments for turn in turns]
