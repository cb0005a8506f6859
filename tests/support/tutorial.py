"""Commands on pages of the documentation, and the files of secrets that those of the tutorial make."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorials" / "first-deployment.md"
FENCED = re.compile(r"^```(?P<language>\S*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


class Command(NamedTuple):
    """One command of a page, without its continuation lines."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def commands_of(page: Path) -> Iterator[Command]:
    """Yield the commands of a page's shell blocks and those that stand before their output."""
    for block in FENCED.finditer(page.read_text()):
        lines = block["code"].replace("\\\n", " ").splitlines()
        shown = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in lines if block["language"] in ("", "sh") else shown:
            if text := re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")).strip():
                yield Command(page.name, re.sub(r"\s+", " ", text) if "'" not in text else text)


def writes_a_file(command: Command) -> bool:
    """Return whether a command makes a file of a secret."""
    return command.text.startswith(("openssl ", "printf ", "python3 -c ", "chmod 600 "))


def make_files(folder: Path) -> None:
    """Make the files of the secrets in a folder, as the tutorial says. Needs openssl."""
    for command in commands_of(TUTORIAL):
        if writes_a_file(command):
            run(command, folder)


def run(command: Command, folder: Path) -> None:
    """Run a command in a folder. Raises AssertionError with what it writes if it fails."""
    done = subprocess.run(["bash", "-c", command.text], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command.text}: {done.stderr}"
