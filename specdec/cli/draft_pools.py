"""The draft models that `specdec up` is given, each a pool of replicas with a name: what `--draft` says of them.

Not here: drafts that need no model (`up_flags`), starting the replicas (`launching`). Called by `up_flags`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

#: The pool of a draft model that is alone and has no name: what a draft service calls its own by itself.
ONLY_POOL = "default"

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"


@dataclass(frozen=True, slots=True)
class DraftPool:
    """One draft model."""

    name: str
    """As requests ask for it."""
    model: str
    group: str
    """What `specdec scale` counts its replicas by, and what their names begin with."""
    for_tokenizer: str = ""
    """Whose tokens it is to make, where it has others of its own."""
    is_shadow: bool = False
    """Whether requests get it by name or promotion alone."""


def draft_pools(given: Sequence[str], reserved: Collection[str]) -> tuple[DraftPool, ...]:
    """The pools of the models that were given as MODEL or NAME=MODEL, in their order.

    A model without a name is called by the last part of its path, with a number where that is taken; one that is alone
    is called "default".

    Args:
        given: values of `--draft`.
        reserved: names that no pool of a model may have.

    Raises:
        ValueError: a name is given twice, or to a pool of another kind; the message is for the user.
    """
    named = [_split(each) for each in given]
    if len(named) == 1 and not named[0][0]:
        return (DraftPool(ONLY_POOL, named[0][1], "draft"),)
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
        pools.append(DraftPool(name, model, "draft" if len(named) == 1 else f"draft-{name}"))
    return tuple(pools)


def joining_pool(name: str, model: str, there_are: Collection[str], reserved: Collection[str]) -> DraftPool:
    """The pool of a draft model that joins a running system as a shadow.

    Raises:
        ValueError: it cannot be called so; the message is for the user.
    """
    if not re.fullmatch(_NAME, name) or name in reserved:
        raise ValueError(f"{name[:80]!a} is no name for a draft model")
    if name in there_are:
        raise ValueError(f"a draft model is called {name} already")
    return DraftPool(name, model, f"draft-{name}", is_shadow=True)


def _split(given: str) -> tuple[str, str]:
    """Name ("" for none) and model. A path may have an equals sign in it, too."""
    found = re.fullmatch(rf"({_NAME})=(.+)", given)
    if found is None or Path(given).exists():
        return "", given
    return found[1], found[2]


def _free_name(model: str, taken: Collection[str]) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(model).name.partition(":")[2] or Path(model).name).strip("-._")[:60]
    stem = stem or "draft"
    return next(name for number in count(1) if (name := stem if number == 1 else f"{stem}-{number}") not in taken)
