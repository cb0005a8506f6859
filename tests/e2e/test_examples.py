"""The examples of the public interfaces, run as a reader runs them, and what the documentation shows as their output.

A page includes an example by a line of `pymdownx.snippets`, and the next block of text shows what it prints. Numbers
and the brackets around accepted tokens depend on the load of the machine, so they are not compared.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gateway_system import System
from tests.support.up_rig import ENVIRON

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = (
    "sdk", "async", "openai_client", "structured_output", "structured_http", "resume_after_a_crash", "own_draft_source",
)  # fmt: skip
PAGES = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "how-to").glob("*.md")))


def shown_output(name: str) -> str:
    """Return the block of text that follows the included example in the documentation."""
    found = re.search(rf"^--8<--\nexamples/{name}\.py\n--8<--\n```\n.*?^```text\n(.*?)^```$", PAGES, re.M | re.S)
    assert found is not None, f"no page includes examples/{name}.py"
    return found[1]


def comparable(output: str) -> list[str]:
    """Return the lines of an output without what may differ from run to run."""
    return [re.sub(r"\d+", "N", line.replace("[", "").replace("]", "")).rstrip() for line in output.splitlines()]


@pytest.fixture(scope="module")
def outputs(demo: System) -> dict[str, str]:
    """Return what each example prints."""
    environ = {"SPECDEC_ENDPOINT": demo.grpc, "OPENAI_BASE_URL": demo.base_url, "PYTHONPATH": str(ROOT)}
    found = {}
    for name in EXAMPLES:
        result = subprocess.run(
            [sys.executable, f"examples/{name}.py"], cwd=ROOT, capture_output=True, text=True, env=ENVIRON | environ
        )
        assert result.returncode == 0, result.stderr
        found[name] = result.stdout
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_the_documentation_shows(name: str, outputs: dict[str, str]) -> None:
    assert comparable(outputs[name]) == comparable(shown_output(name))


def test_a_changed_output_would_be_noticed() -> None:
    assert comparable("3 of [4]\nTrue\n") == comparable("12 of [13]\nTrue\n")
    assert comparable("3 of 4\nTrue\n") != comparable("3 of 4\nFalse\n")


def test_proposals_of_an_own_draft_source_are_accepted_once_it_knows_the_text(outputs: dict[str, str]) -> None:
    before, after = re.findall(r"(\d+) of \d+ draft tokens accepted, (\d+) rounds", outputs["own_draft_source"])
    assert int(after[0]) > int(before[0])
    assert int(after[1]) < int(before[1])


def test_a_stream_resumes_in_the_middle(outputs: dict[str, str]) -> None:
    before, after = re.findall(
        r"-- (\d+) tokens came before the crash, (\d+) after it", outputs["resume_after_a_crash"]
    )[0]
    assert int(before) >= 20
    assert int(before) + int(after) == 64
