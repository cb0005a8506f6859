"""The AI SDK of JavaScript against a gateway whose model calls tools: objects, loops, streams and a refusal."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.optional_clients import REASON
from tests.support.up_rig import ENVIRON

ROOT = Path(__file__).resolve().parents[2]
#: Packages that `make test-clients` installs beside those of Python.
PACKAGES = Path(sys.prefix) / "node_modules"

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node on the PATH"),
    pytest.mark.skipif(not (PACKAGES / "ai").is_dir(), reason=REASON),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the packages, because node looks for them beside a program."""
    folder = tmp_path_factory.mktemp("ai_sdk")
    (folder / "node_modules").symlink_to(PACKAGES)
    return folder


def printed(program: Path, folder: Path, tool_url: str) -> str:
    """Return what a program prints."""
    copy = shutil.copy(program, folder)
    environ = ENVIRON | {"OPENAI_BASE_URL": f"{tool_url}/v1"}
    result = subprocess.run(["node", copy], capture_output=True, text=True, env=environ)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def found(folder: Path, tool_url: str) -> Any:
    return json.loads(printed(ROOT / "tests" / "support" / "ai_sdk_streams.mjs", folder, tool_url))


def test_an_object_follows_its_schema_whole_and_streamed(found: Any) -> None:
    assert found["whole"]["answer"] in ("yes", "no")
    assert found["whole"]["isSure"] in (True, False)
    assert found["streamed"] == found["whole"]
    assert found["numPartial"] > 1
    usage = found["wholeUsage"]
    assert usage["totalTokens"] == usage["inputTokens"] + usage["outputTokens"]
    assert usage["outputTokenDetails"]["reasoningTokens"] == 0


def test_a_streamed_loop_runs_the_tool_and_sends_its_result_back(found: Any) -> None:
    assert found["steps"] == [["tool-calls", ["filed"]]] * 2
    inputs = [json.loads(text) for text in re.findall(r"\{[^}]*\}", found["deltas"])]
    assert inputs == found["done"]


def test_reasoning_is_told_and_counted(found: Any) -> None:
    assert found["reasoning"]
    assert found["reasoningTokens"] == 8


def test_a_bad_setting_is_refused_in_words(found: Any) -> None:
    status, message = found["refused"]
    assert status == 400
    assert message.startswith("temperature must be")


def test_the_example_prints_what_its_guide_shows(folder: Path, tool_url: str) -> None:
    guide = (ROOT / "docs" / "how-to" / "tools-and-agents.md").read_text()
    assert f"```text\n{printed(ROOT / 'examples' / 'ai_sdk.mjs', folder, tool_url)}```\n" in guide
