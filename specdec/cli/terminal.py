"""How output looks: tokens coloured by source, the legend, the closing line.

Not here: where tokens come from. Called by `generate`, `chat` and `examples/demo.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from rich.color import ColorSystem
from rich.style import Style

from specdec.client import Chunk, Completion
from specdec.client.results import CANCELLED
from specdec.types import TokenSource

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
#: Escape, and the one-character forms of what it begins (C1 controls), as something to see.
_HARMLESS = {0x1B: "\N{SYMBOL FOR ESCAPE}"} | dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether to colour: a terminal, not a dumb one, and no NO_COLOR."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class TokenWriter:
    """Writes chunks as they come, each token in the colour of its source, or plainly."""

    def __init__(self, stream: TextIO, *, coloured: bool) -> None:
        self._stream = stream
        self._coloured = coloured
        self._is_terminal = stream.isatty()

    def write(self, chunk: Chunk) -> None:
        """Writes a chunk's text and flushes."""
        texts = [detail.text for detail in chunk.details]
        if not self._coloured or "".join(texts) != chunk.text:
            self._stream.write(self._shown(chunk.text))
        else:
            for detail in chunk.details:
                self._stream.write(self._painted(detail.text, detail.source))
        self._stream.flush()

    def legend(self) -> str:
        """One line that names the colours; "" when there are none."""
        if not self._coloured:
            return ""
        return "  ".join(self._painted(name, source) for source, name in _NAMES.items())

    def _painted(self, text: str, source: TokenSource) -> str:
        return _STYLES[source].render(self._shown(text), color_system=ColorSystem.STANDARD) if text else ""

    def _shown(self, text: str) -> str:
        # A model's escape sequences must not drive the terminal; a pipe gets the text as it is.
        return text.translate(_HARMLESS) if self._is_terminal else text


def tokens_per_s(completion: Completion) -> float:
    """Output tokens over the server's end-to-end time; 0 for an empty output."""
    e2el_s = completion.stats.e2el_s
    return completion.usage.num_output_tokens / e2el_s if e2el_s > 0 else 0.0


def has_tested_drafts(completion: Completion) -> bool:
    """Whether the target tested any draft token of an output with provenance."""
    return _num_tested(completion) > 0


def _num_tested(completion: Completion) -> int:
    # A round tests up to its first rejection.
    return sum(detail.source in (TokenSource.ACCEPTED, TokenSource.CORRECTED) for detail in completion.details)


def closing_line(completion: Completion, *, drafting: str = "") -> str:
    """rounds, alpha (accepted / tested), tau (tokens a round), tokens/s of one output with provenance.

    `drafting`, if it says more of how it was made, stands for alpha and tau where no draft token was tested, else after
    them. An output that was left has no figures of the server's. A conversation that another target model goes on with
    says so.
    """
    num_tested = _num_tested(completion)
    num_accepted = sum(detail.source is TokenSource.ACCEPTED for detail in completion.details)
    alpha = f"alpha {num_accepted / num_tested:.2f}" if num_tested else "alpha n/a"
    if completion.finish_reason == CANCELLED:
        return f"stopped after {len(completion.token_ids)} tokens  {drafting or alpha}"
    num_rounds = completion.stats.num_rounds
    tau = f"{completion.usage.num_output_tokens / num_rounds:.2f}" if num_rounds else "n/a"
    changed = "  (another target model than before)" if completion.target_changed else ""
    figures = [f"{alpha}  tau {tau}"] if num_tested or not drafting else []
    parts = [f"rounds {num_rounds}", *figures, *filter(None, [drafting]), f"{tokens_per_s(completion):.1f} tokens/s"]
    return "  ".join(parts) + changed
