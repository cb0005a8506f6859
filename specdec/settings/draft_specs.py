"""Local drafts: what a target is told to draft with by itself, as `--local-draft` names it.

    [NAME=]early-exit:LAYERS[:PATH]     the target's first LAYERS layers with its own norm and head; PATH: an adapter
    [NAME=]medusa:PATH                  heads that are trained for the target
    [NAME=]eagle3:PATH
    [NAME=]mtp                          the heads that the checkpoint brings

NAME is what `speculation.draft_pool` asks for; without one it is the kind's. Not here: what a kind computes
(`specdec.engine.model.early_exit`, `specdec.engine.heads`). No torch: settings and the command line read this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

EARLY_EXIT = "early-exit"

#: Kinds with what follows their name: a path that must be there, or nothing.
HEAD_KINDS = {"medusa": True, "eagle3": True, "mtp": False}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class LocalDraftSpec:
    """One local draft, as it was asked for."""

    name: str
    """Of its pool."""
    kind: str
    """`EARLY_EXIT`, or one of `HEAD_KINDS`."""
    num_layers: int = 0
    """Of an early exit: how many of the target's layers run; at least 1."""
    path: str = ""
    """Of heads, or of an early exit's adapter; "" where there is none."""

    def __str__(self) -> str:
        kind = f"{self.kind}:{self.num_layers}" if self.kind == EARLY_EXIT else self.kind
        return f"{kind}:{self.path}" if self.path else kind


def is_local_draft(text: str) -> bool:
    """Whether `text` means a local draft, well or badly formed, and not a model."""
    return _split_name(text)[1].partition(":")[0] in (EARLY_EXIT, *HEAD_KINDS)


def parse_local_draft(text: str) -> LocalDraftSpec:
    """Reads one `--local-draft`.

    Raises:
        ValueError: it is none; one sentence says what is expected.
    """
    name, rest = _split_name(text)
    kind, _, argument = rest.partition(":")
    name = kind if name is None else name
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a pool: 1 to 64 letters, digits, '_', '.' or '-'")
    if kind == EARLY_EXIT:
        layers, _, path = argument.partition(":")
        if not (layers.isascii() and layers.isdecimal() and 0 < int(layers) < 1 << 16):
            raise ValueError(f"{text!r}: early-exit takes a number of layers, as in early-exit:3")
        return LocalDraftSpec(name, kind, int(layers), path)
    if kind not in HEAD_KINDS:
        raise ValueError(f"{text!r} is no local draft: early-exit:LAYERS[:PATH], medusa:PATH, eagle3:PATH or mtp")
    if HEAD_KINDS[kind] and not argument:
        raise ValueError(f"{text!r}: {kind} takes the path of its heads, as in {kind}:PATH")
    if argument and not HEAD_KINDS[kind]:
        raise ValueError(f"{text!r}: {kind} takes no argument")
    return LocalDraftSpec(name, kind, path=argument)


def _split_name(text: str) -> tuple[str | None, str]:
    """NAME, if there is one, and what follows; a path may have a "=" of its own."""
    name, is_named, rest = text.partition("=")
    return (name, rest) if is_named and ":" not in name else (None, text)


def parse_local_drafts(texts: Sequence[str]) -> tuple[LocalDraftSpec, ...]:
    """Reads several.

    Raises:
        ValueError: one is none, or two have one name.
    """
    specs = tuple(parse_local_draft(text) for text in texts)
    names = [spec.name for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two local drafts are called {twice!r}: name them, as in NAME={specs[names.index(twice)]}")
    return specs
