"""Reads the values of `--local-draft`: drafts that a target computes itself.

    [NAME=]early-exit:LAYERS[:PATH]     the target's first LAYERS layers with its own norm and head; PATH: an adapter
    [NAME=]medusa:PATH                  heads that are trained for the target
    [NAME=]eagle3:PATH
    [NAME=]mtp                          the heads that the checkpoint brings

Requests select the draft by NAME (`speculation.draft_pool`), which defaults to the kind. `specdec.engine` computes the
kinds. Imports no torch, because settings and the command line use this module.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

EARLY_EXIT = "early-exit"

#: Kinds of heads. True: a path must follow the kind; False: nothing may follow it.
HEAD_KINDS = {"medusa": True, "eagle3": True, "mtp": False}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class LocalDraftSpec:
    """One in-target draft."""

    name: str
    """Name of its draft pool."""
    kind: str
    """Kind of the draft: `EARLY_EXIT`, or one of `HEAD_KINDS`."""
    num_layers: int = 0
    """Number of the target's layers that an early exit runs, at least 1; 0 for heads."""
    path: str = ""
    """Path of the heads or of the early exit's adapter; "" if unset."""

    def __str__(self) -> str:
        kind = f"{self.kind}:{self.num_layers}" if self.kind == EARLY_EXIT else self.kind
        return f"{kind}:{self.path}" if self.path else kind


def is_local_draft(text: str) -> bool:
    """Return whether `text` names an in-target draft, well or badly formed, instead of a model."""
    return _split_name(text)[1].partition(":")[0] in (EARLY_EXIT, *HEAD_KINDS)


def parse_local_draft(text: str) -> LocalDraftSpec:
    """Return the draft that one `--local-draft` names.

    Raises:
        ValueError: the text is malformed; the message says what is expected.
    """
    name, rest = _split_name(text)
    kind, _, argument = rest.partition(":")
    name = kind if name is None else name
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name of a pool must be 1 to 64 letters, digits, '_', '.' or '-', not {name!r}")
    if kind == EARLY_EXIT:
        layers, _, path = argument.partition(":")
        if not (layers.isascii() and layers.isdecimal() and 0 < int(layers) < 1 << 16):
            raise ValueError(f"{text!r}: early-exit takes a number of layers, as in early-exit:3")
        return LocalDraftSpec(name, kind, int(layers), path)
    if kind not in HEAD_KINDS:
        raise ValueError(
            f"a local draft must be early-exit:LAYERS[:PATH], medusa:PATH, eagle3:PATH or mtp, not {text!r}"
        )
    if HEAD_KINDS[kind] and not argument:
        raise ValueError(f"{text!r}: {kind} takes the path of its heads, as in {kind}:PATH")
    if argument and not HEAD_KINDS[kind]:
        raise ValueError(f"{text!r}: {kind} takes no argument")
    return LocalDraftSpec(name, kind, path=argument)


def _split_name(text: str) -> tuple[str | None, str]:
    """Return NAME, or None, and the text after it. A path may contain "=" too."""
    name, is_named, rest = text.partition("=")
    return (name, rest) if is_named and ":" not in name else (None, text)


def parse_local_drafts(texts: Sequence[str]) -> tuple[LocalDraftSpec, ...]:
    """Return the drafts that several `--local-draft` name.

    Raises:
        ValueError: a text is malformed, or two drafts have the same name.
    """
    specs = tuple(parse_local_draft(text) for text in texts)
    names = [spec.name for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two local drafts are called {twice!r}: name them, as in NAME={specs[names.index(twice)]}")
    return specs
