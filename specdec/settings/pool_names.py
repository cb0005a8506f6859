"""What a pool of replicas may be called: its name is shown in terminals, counted by in metrics and kept for good.

Not here: which pools there are (the coordinator's `replicas/pool`), names of local drafts
(`specdec.settings.draft_specs`), which may be less. No torch: settings read this.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

MAX_POOL_NAME_CHARS = 64


def is_pool_name(name: str) -> bool:
    """Whether `name` is 1 to `MAX_POOL_NAME_CHARS` printable characters."""
    return 0 < len(name) <= MAX_POOL_NAME_CHARS and name.isprintable()


def check_pool_name(name: str) -> str:
    """Returns `name`.

    Raises:
        ValueError: it is no name of a pool; one sentence says what is expected.
    """
    if not is_pool_name(name):
        shown = ascii(name[: MAX_POOL_NAME_CHARS + 1])
        raise ValueError(f"{shown} is no name of a pool: 1 to {MAX_POOL_NAME_CHARS} printable characters")
    return name


def _check_if_any(name: str) -> str:
    return name and check_pool_name(name)


PoolName = Annotated[str, AfterValidator(check_pool_name)]
"""1 to `MAX_POOL_NAME_CHARS` printable characters."""

OptionalPoolName = Annotated[str, AfterValidator(_check_if_any)]
"""The same, or "" for none."""
