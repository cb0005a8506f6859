"""Sets fields of protobuf messages. A value that does not fit raises InvalidRequest, which names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.contract.errors import InvalidRequest

_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "True or False"}
#: Least and greatest whole number of a field, by protobuf's number of the type.
_RANGES = {
    1: (-(1 << 31), (1 << 31) - 1),
    2: (-(1 << 63), (1 << 63) - 1),
    3: (0, (1 << 32) - 1),
    4: (0, (1 << 64) - 1),
}


def assign(message: Any, name: str, value: Any, prefix: str = "") -> None:
    """Set a field. `prefix` stands before its name in an error."""
    try:
        setattr(message, name, value)
    except TypeError:  # protobuf's own message speaks of its internals
        wanted = _KINDS[type(getattr(message, name))]
        got = "None" if value is None else type(value).__name__
        raise InvalidRequest(f"{prefix}{name} must be {wanted}, got {got}", field=f"{prefix}{name}") from None
    except (ValueError, OverflowError) as error:  # UnicodeEncodeError is a ValueError
        told = _out_of_range(message, name, (value,)) or f": {error}"
        raise InvalidRequest(f"{prefix}{name}{told}", field=f"{prefix}{name}") from None


def extend(message: Any, name: str, values: Sequence[Any], prefix: str = "") -> None:
    """Append to a repeated field."""
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError, OverflowError) as error:
        told = _out_of_range(message, name, values) or f": {error}"
        raise InvalidRequest(f"{prefix}{name}{told}", field=f"{prefix}{name}") from None


def _out_of_range(message: Any, name: str, values: Sequence[Any]) -> str:
    """Return what to say of the first whole number that a field cannot hold; "" if there is none."""
    if (bounds := _RANGES.get(message.DESCRIPTOR.fields_by_name[name].cpp_type)) is None:
        return ""
    least, most = bounds
    wrong = next((value for value in values if isinstance(value, int) and not least <= value <= most), None)
    if wrong is None:
        return ""
    got = str(wrong) if wrong.bit_length() <= 256 else f"a number of {wrong.bit_length()} bits"  # str has a limit
    return f" must be at least {least} and at most {most}, got {got}"


def as_json(value: Mapping[str, Any], field: str) -> str:
    """Return a value as JSON. Raises InvalidRequest, which names `field`, where JSON cannot hold it."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} must be JSON: {error}", field=field) from None
