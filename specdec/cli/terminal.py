"""Writes output to the terminal: tokens coloured by their source, and the legend of the colours.

`generate`, `chat` and the examples use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from rich.color import ColorSystem
from rich.style import Style

from specdec.client import Chunk
from specdec.contract.types import TokenSource

_STYLES = {
    TokenSource.ACCEPTED: Style(color="green"),
    TokenSource.CORRECTED: Style(color="red"),
    TokenSource.BONUS: Style(color="cyan"),
    TokenSource.TARGET: Style(color="yellow"),
}
_NAMES = {
    TokenSource.ACCEPTED: "accepted",
    TokenSource.CORRECTED: "corrected",
    TokenSource.BONUS: "bonus",
    TokenSource.TARGET: "target-only",
}
#: Visible replacements for the escape character and for the C1 control characters.
_HARMLESS = {0x1B: "\N{SYMBOL FOR ESCAPE}"} | dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether to colour: the stream is a terminal that is not dumb, and NO_COLOR is unset."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class TokenWriter:
    """Writes chunks, each token in the colour of its source if `coloured`."""

    def __init__(self, stream: TextIO, *, coloured: bool) -> None:
        self._stream = stream
        self._coloured = coloured
        self._is_terminal = stream.isatty()

    def write(self, chunk: Chunk) -> None:
        """Write a chunk's text and flush the stream."""
        texts = [detail.text for detail in chunk.details]
        if not self._coloured or "".join(texts) != chunk.text:
            self._stream.write(self.shown(chunk.text))
        else:
            for detail in chunk.details:
                self._stream.write(self._painted(detail.text, detail.source))
        self._stream.flush()

    def legend(self) -> str:
        """Return one line that names the colours; "" without colours."""
        if not self._coloured:
            return ""
        return "  ".join(self._painted(name, source) for source, name in _NAMES.items())

    def _painted(self, text: str, source: TokenSource | None) -> str:
        if not text or source is None:
            return self.shown(text)
        return _STYLES[source].render(self.shown(text), color_system=ColorSystem.STANDARD)

    def shown(self, text: str) -> str:
        """Return a text of the model as it may be printed."""
        # A model's escape sequences must not control the terminal. A pipe gets the text unchanged.
        return text.translate(_HARMLESS) if self._is_terminal else text
