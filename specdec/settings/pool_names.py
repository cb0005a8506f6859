"""Checks names of replica pools, which terminals show, metrics use as labels, and the store keeps.

Names of in-target drafts are stricter (`specdec.settings.draft_specs`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

MAX_POOL_NAME_CHARS = 64


def is_pool_name(name: str) -> bool:
    """Return whether `name` has 1 to `MAX_POOL_NAME_CHARS` printable characters."""
    return 0 < len(name) <= MAX_POOL_NAME_CHARS and name.isprintable()


def check_pool_name(name: str) -> str:
    """Return `name`.

    Raises:
        ValueError: a pool cannot have this name; the message says what is expected.
    """
    if not is_pool_name(name):
        shown = ascii(name[: MAX_POOL_NAME_CHARS + 1])
        raise ValueError(f"the name of a pool must be 1 to {MAX_POOL_NAME_CHARS} printable characters, not {shown}")
    return name


def _check_if_any(name: str) -> str:
    return name and check_pool_name(name)


PoolName = Annotated[str, AfterValidator(check_pool_name)]
"""1 to `MAX_POOL_NAME_CHARS` printable characters."""

OptionalPoolName = Annotated[str, AfterValidator(_check_if_any)]
"""1 to `MAX_POOL_NAME_CHARS` printable characters, or "" if unset."""
