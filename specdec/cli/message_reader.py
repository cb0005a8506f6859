"""Reads the user's messages: a line each, a paste as one, or several lines between triple quotes.

Not here: what a message means (`chat`). With a terminal, lines are edited by readline where Python was built with it,
and its bracketed paste hands over a pasted text whole.
"""

from __future__ import annotations

import contextlib
import sys

_QUOTES = '"""'


class MessageReader:
    """Reads from standard input. Make one: it sets the terminal up."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        if self.is_terminal:
            with contextlib.suppress(ImportError):  # a terminal without it edits lines by itself, and pastes them apart
                import readline

                readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self) -> str | None:
        """The next message, or None at the end of input. Ctrl-C discards what has been typed of it."""
        is_over = False
        while not is_over:
            try:
                try:
                    return self._read_message()
                except EOFError:
                    is_over = True
                    if self.is_terminal:
                        print()
            except KeyboardInterrupt:  # perhaps kept since before Ctrl-D: readline misses one just after its prompt
                print()
        return None

    def _read_message(self) -> str:
        line = self._read_line("> ")
        if not line.lstrip().startswith(_QUOTES):
            return line
        text = line.lstrip().removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + self._read_line(". ")
        return text.rstrip().removesuffix(_QUOTES).strip("\n")

    def _read_line(self, prompt: str) -> str:
        return input(prompt if self.is_terminal else "")
