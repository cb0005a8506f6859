"""Sets fields of protobuf messages. A value that does not fit raises InvalidRequest, which names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.contract.errors import InvalidRequest

_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "True or False"}


def assign(message: Any, name: str, value: Any, prefix: str = "") -> None:
    """Set a field. `prefix` stands before its name in an error."""
    try:
        setattr(message, name, value)
    except TypeError:  # protobuf's own message speaks of its internals
        wanted = _KINDS[type(getattr(message, name))]
        got = "None" if value is None else type(value).__name__
        raise InvalidRequest(f"{prefix}{name} must be {wanted}, got {got}", field=f"{prefix}{name}") from None
    except (ValueError, OverflowError) as error:  # UnicodeEncodeError is a ValueError
        raise InvalidRequest(f"{prefix}{name}: {error}", field=f"{prefix}{name}") from None


def extend(message: Any, name: str, values: Sequence[Any], prefix: str = "") -> None:
    """Append to a repeated field."""
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{prefix}{name}: {error}", field=f"{prefix}{name}") from None


def as_json(value: Mapping[str, Any], field: str) -> str:
    """Return a value as JSON. Raises InvalidRequest, which names `field`, where JSON cannot hold it."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} must be JSON: {error}", field=field) from None
