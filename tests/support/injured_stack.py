"""A stack whose draft and target have devices that a test can make fail, hang or slow down (`injured_service`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.stack import Stack


class Injured:
    """The injuries of a stack that has not started yet."""

    def __init__(self, stack: Stack, directory: Path, names: Sequence[str] = ("target", "draft")) -> None:
        """`names`: parts whose devices can be injured; `directory`: an empty one for the injuries."""
        self.stack = stack
        self._directory = directory
        for name in names:
            part = stack.parts[name]
            (directory / name).mkdir()
            part.arguments = [part.module, str(directory / name), *part.arguments]
            part.module = "tests.support.injured_service"

    def injure(self, name: str, how: str, text: str = "") -> None:
        """Begin an injury of a part's device, or change the text of one."""
        written = self._directory / how
        written.write_text(text)
        written.rename(self._directory / name / how)  # at once: a step must not read half of the text

    def heal(self, name: str, how: str = "*") -> None:
        """End an injury of a part's device; all of them unless one is named."""
        for injury in (self._directory / name).glob(how):
            injury.unlink()
