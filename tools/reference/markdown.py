"""Markdown that the reference pages are built from: wrapped paragraphs, list items and links into the documentation."""

from __future__ import annotations

import re
import textwrap

WIDTH = 120
NOTICE = "<!-- Generated from the code by `make reference`. Edit the code, not this page. -->"
_SECTION = re.compile(r"docs/protocol\.md,? sections? ")
_PAGE = re.compile(r"\bdocs/(?P<page>[\w-]+)\.md")


def document(title: str, *blocks: str) -> str:
    """Return a whole page: title, notice and blocks with a blank line between them."""
    return "\n\n".join([f"# {title}", NOTICE, *blocks]) + "\n"


def paragraph(text: str) -> str:
    """Return the text as one wrapped paragraph."""
    return "\n".join(_wrap(sentence(text)))


def item(head: str, text: str, *, level: int = 0) -> str:
    """Return a wrapped list item: `head`, then what the text says about it."""
    indent = "  " * level
    body = f"{head}: {sentence(text)}" if text else f"{head}."
    return "\n".join(_wrap(f"{indent}- {body}", following=f"{indent}  "))


def items(entries: list[str]) -> str:
    """Return list items as one list."""
    return "\n".join(entries)


def code(text: object) -> str:
    """Return the text as an inline code span."""
    return f"`{text}`"


def sentence(text: str) -> str:
    """Return the text on one line with a full stop at its end; references to pages become links."""
    line = " ".join(text.split())
    line = _SECTION.sub("[protocol](../protocol.md), section ", line)
    line = _PAGE.sub(lambda found: f"[{found['page']}](../{found['page']}.md)", line)
    return line if line.endswith((".", ":", "!", "?")) else f"{line}."


def _wrap(text: str, following: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=following, break_long_words=False, break_on_hyphens=False)
