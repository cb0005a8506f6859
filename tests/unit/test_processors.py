"""How many processors a process counts on: those of its affinity, within the quota of its control group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdec.settings.processors import affine_processors, cpu_quota, num_processors


@pytest.mark.parametrize(
    ("text", "quota", "at_most"),
    [("max 100000\n", None, None), ("50000 100000\n", 0.5, 1), ("150000 100000\n", 1.5, 2), ("100000 0\n", None, None),
     ("nonsense", None, None)],
)  # fmt: skip
def test_a_quota_bounds_the_number_and_a_part_of_a_processor_counts_as_one(
    tmp_path: Path, text: str, quota: float | None, at_most: int | None
) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path) == quota
    assert num_processors(tmp_path) == min(affine_processors(), at_most or affine_processors())


def test_the_first_version_of_control_groups_is_read_as_well(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert (cpu_quota(tmp_path), num_processors(tmp_path)) == (1.0, 1)


def test_without_control_groups_the_affinity_decides(tmp_path: Path) -> None:
    assert num_processors(tmp_path) == affine_processors() == len(os.sched_getaffinity(0))
