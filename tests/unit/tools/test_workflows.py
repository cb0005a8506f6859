"""The workflows stay thin: they call targets of make, for the Python versions that the package supports."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps_of(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_command_of_a_workflow_is_one_line_that_calls_make_ci_or_a_release(path: Path) -> None:
    commands = [step["run"] for step in steps_of(path) if "run" in step]
    assert commands
    for command in commands:
        assert "\n" not in command
        assert command == ".ci/run" or command.startswith(("make ", "gh release create "))
        if command.startswith("make "):
            targets = [word for word in command.split()[1:] if "=" not in word]
            assert set(targets) <= TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_command_of_a_workflow_contains_what_others_write(path: Path) -> None:
    assert not [step for step in steps_of(path) if "${{" in step.get("run", "")]


def test_ci_runs_on_every_supported_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    supported = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    expected = [f"3.{minor}" for minor in range(30) if f"3.{minor}" in supported]
    assert workflow["jobs"]["ci"]["strategy"]["matrix"]["python"] == expected
