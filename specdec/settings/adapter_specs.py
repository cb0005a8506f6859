"""Reads the values of `--adapter`: adapters of a server's model, and the names under which a target serves them.

NAME=PATH_OR_ID     the server lists the adapter as PATH_OR_ID, its id or the path that it was loaded from
NAME                the server lists it under the same name
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.contract.engine_api import MAX_ADAPTERS, is_adapter_name


class AdapterSpec(NamedTuple):
    """One adapter."""

    name: str
    """Name by which requests select it."""
    listed: str
    """Its id in the server's list of models, or the path that the list states for it."""


def parse_adapters(texts: Sequence[str]) -> tuple[AdapterSpec, ...]:
    """Return the adapters that several `--adapter` name.

    Raises:
        ValueError: a text is malformed, there are too many, or two adapters have the same name.
    """
    if len(texts) > MAX_ADAPTERS:
        raise ValueError(f"one target serves at most {MAX_ADAPTERS} adapters, not {len(texts)}")
    specs = tuple(_parse(text) for text in texts)
    names = [spec.name for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two adapters are called {twice!r}: give each a name, as in NAME={specs[-1].listed}")
    return specs


def _parse(text: str) -> AdapterSpec:
    name, _, listed = text.partition("=")
    if not is_adapter_name(name):
        raise ValueError(
            f"an adapter must be NAME=PATH_OR_ID with a name of 1 to 128 printable ASCII characters, not {text[:200]!r}"
        )
    if text.endswith("=") and not listed:
        raise ValueError(f"{text[:200]!r} must state after = how the server lists the adapter: its id or its path")
    return AdapterSpec(name, listed or name)
