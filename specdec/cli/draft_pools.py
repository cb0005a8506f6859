"""Reads the draft models of `specdec up --draft`, each a pool of replicas with a name."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

#: Pool of a lone draft model without a name: the default of a draft service's --pool.
ONLY_POOL = "default"

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"


@dataclass(frozen=True, slots=True)
class DraftPoolSpec:
    """One draft model and its pool."""

    name: str
    """Name by which requests select the pool."""
    model: str
    group: str
    """Role of its replicas in `specdec scale`, and the beginning of their names."""
    for_tokenizer: str = ""
    """Model whose tokens it drafts, if its own tokenizer differs; else ""."""
    is_shadow: bool = False
    """True if requests use the pool only by name or after a promotion."""


def draft_pools(given: Sequence[str], reserved: Collection[str]) -> tuple[DraftPoolSpec, ...]:
    """Return the pools of models given as MODEL or NAME=MODEL, in their order.

    A pool without a name is called after the last part of the model's path, with a number if that name is taken. A lone
    pool without a name is called "default".

    Args:
        given: values of `--draft`.
        reserved: names that pools of models must not have.

    Raises:
        ValueError: a name is given twice or reserved; the message is for the user.
    """
    named = [_split(each) for each in given]
    if len(named) == 1 and not named[0][0]:
        return (DraftPoolSpec(ONLY_POOL, named[0][1], "draft"),)
    taken: list[str] = []
    for name, _ in named:
        if name and name in taken:
            raise ValueError(f"two draft models are called {name}")
        if name in reserved:
            raise ValueError(f"a draft model cannot be called {name}, which is a kind of drafts")
        taken += [name] if name else []
    pools = []
    for name, model in named:
        if not name:
            name = _free_name(model, {*taken, *reserved})
            taken.append(name)
        pools.append(DraftPoolSpec(name, model, "draft" if len(named) == 1 else f"draft-{name}"))
    return tuple(pools)


def joining_pool(name: str, model: str, there_are: Collection[str], reserved: Collection[str]) -> DraftPoolSpec:
    """Return the pool of a draft model that joins a running system as a shadow.

    Raises:
        ValueError: the name is malformed, reserved or taken; the message is for the user.
    """
    if not re.fullmatch(_NAME, name) or name in reserved:
        raise ValueError(f"a draft model cannot be called {name[:80]!a}")
    if name in there_are:
        raise ValueError(f"a draft model is called {name} already")
    return DraftPoolSpec(name, model, f"draft-{name}", is_shadow=True)


def _split(given: str) -> tuple[str, str]:
    """Return the name, or "", and the model. A path may contain an equals sign too."""
    found = re.fullmatch(rf"({_NAME})=(.+)", given)
    if found is None or Path(given).exists():
        return "", given
    return found[1], found[2]


def _free_name(model: str, taken: Collection[str]) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(model).name.partition(":")[2] or Path(model).name).strip("-._")[:60]
    stem = stem or "draft"
    return next(name for number in count(1) if (name := stem if number == 1 else f"{stem}-{number}") not in taken)
