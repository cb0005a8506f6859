"""Hand the settings of this machine's pip, and the files that they name, to the builds of images.

They are mounted, so that no image holds them. Called by `images`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

_INSIDE = "/etc/pip.conf"


def mounts(folder: Path) -> list[str]:
    """Write the settings to a file in `folder`; return the mounts of it and of the paths in it."""
    settings = _settings()
    path = folder / "pip.conf"
    lines = [f"{name} = {value.replace(chr(10), chr(10) + '    ')}" for name, value in settings.items()]
    path.write_text("\n".join(["[global]", *lines, ""]))
    paths = {found for value in settings.values() for found in _paths(value)}
    return [f"{path}:{_INSIDE}:ro", *(f"{found}:{found}:ro" for found in sorted(paths))]


def _settings() -> dict[str, str]:
    """Return what `pip config list` prints, by the name of the setting; variables take precedence over files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = [line.partition("=")[::2] for line in output.splitlines()]
    pairs.sort(key=lambda pair: pair[0].startswith(":env:"))
    return {key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, value in pairs}


def _paths(value: str) -> list[str]:
    words = [word.removeprefix("file://") for word in value.split()]
    # The pages of an index on disk lead to files beside them.
    return [word.removesuffix("/simple") for word in words if word.startswith("/") and Path(word).exists()]
