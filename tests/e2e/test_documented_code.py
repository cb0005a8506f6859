"""Every block of code in README.md and docs/*.md that is Python or a `specdec` command runs, on the demo pair.

What another machine is needed for is skipped with its reason; a command that is neither run nor excused fails.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.up_rig import ENVIRON, SPECDEC, specdec, start_up

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(?P<language>\S*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "bash", "shell", "console")
ADDRESS = "127.0.0.1:50051"

#: Commands that no test of this file can run, by what they look like.
EXCUSES = {
    r"make \S+": "make's targets are what CI runs",
    r"\. \S*activate": "the environment is already there",
    r"specdec up .*(--device cuda|Qwen/|\.gguf)": "needs a GPU, the Hugging Face hub or a model of the reader's own",
    r"specdec up( &)?": "is what the other commands run on here",
    r"python -m (target_service|draft_service|coordinator) .*redis://redis": "needs a GPU and other machines",
    r"python3? -m pip ": "installs packages",
    r"(docker|kubectl|kustomize|helm|git|apt-get|brew) ": "needs a cluster, a daemon or the network",
    r"python -m bench ": "is measured by `make bench`",
}


class Block(NamedTuple):
    """A block of code; its name is the document's with the line."""

    name: str
    language: str
    code: str

    @property
    def commands(self) -> list[str]:
        """Of a shell's block, without comments."""
        lines = self.code.replace("\\\n", " ").splitlines()
        shown = (re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")).strip() for line in lines)
        return [command for command in shown if command]


def blocks() -> list[Block]:
    return [
        Block(f"{path.name}:{text[: found.start()].count(chr(10)) + 1}", found["language"], found["code"])
        for path in DOCUMENTS
        for text in [path.read_text()]
        for found in FENCED.finditer(text)
    ]


PYTHON = [block for block in blocks() if block.language == "python"]
COMMANDS = [(block.name, command) for block in blocks() if block.language in SHELL for command in block.commands]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    up, endpoint = start_up()
    yield endpoint
    up.send_signal(signal.SIGTERM)
    up.communicate()


def test_every_block_has_a_language_that_is_known() -> None:
    known = {*SHELL, "python", "mermaid", "json", "yaml", "toml", "proto", "text", "promql"}
    assert [block.name for block in blocks() if block.language not in known] == []
    assert PYTHON
    assert COMMANDS


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_a_python_block_runs(block: Block, endpoint: str) -> None:
    assert ADDRESS in block.code  # otherwise it speaks to nobody, or to somebody else
    code = block.code.replace(ADDRESS, endpoint)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRON)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=lambda value: value)
def test_a_command_runs_or_says_why_not(name: str, command: str, endpoint: str) -> None:
    for pattern, reason in EXCUSES.items():
        if re.match(pattern, command):
            pytest.skip(f"{name}: {reason}")
    assert command.startswith(("specdec ", "printf ")), f"{name}: {command} is neither run nor excused"
    shown = command.replace("specdec", shlex.join(SPECDEC))
    result = subprocess.run(
        shown, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=ENVIRON | {"SPECDEC_ENDPOINT": endpoint},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "error" not in result.stderr


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    assert specdec("chatter").returncode == 2
