"""Sets fields of protobuf messages. A value that does not fit raises InvalidRequest, which names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, SupportsFloat

from specdec.contract.errors import InvalidRequest
from specdec.contract.types import LEAST_SEED, NUM_SEEDS

_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "True or False"}
#: Least and greatest whole number of a field, by protobuf's number of the type.
_RANGES = {
    1: (-(1 << 31), (1 << 31) - 1),
    2: (-(1 << 63), (1 << 63) - 1),
    3: (0, (1 << 32) - 1),
    4: (0, (1 << 64) - 1),
}
#: protobuf's numbers of the types of floats.
_FLOATS = (5, 6)
#: Most bits of a whole number that a Python float holds.
_MOST_FLOAT_BITS = 1024
_FLOAT_LIMITS = "must be 0 or have a size from 1.4e-45 to 3.4028234e+38, the limits of a 32-bit float"


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
        if isinstance(error, UnicodeEncodeError):
            told = f": must not contain halves of surrogate pairs, got one at character {error.start}"
        raise InvalidRequest(f"{prefix}{name}{told}", field=f"{prefix}{name}") from None
    _require_kept(f"{prefix}{name}", value, getattr(message, name))


def assign_seed(message: Any, name: str, value: Any, prefix: str = "") -> None:
    """Set a field to a seed, which counts modulo 2^64: OpenAI's clients send negative ones."""
    is_whole = hasattr(value, "__index__")
    if is_whole and not LEAST_SEED <= index(value) < NUM_SEEDS:
        limits = f"must be at least {LEAST_SEED} and at most {NUM_SEEDS - 1}"
        raise InvalidRequest(f"{prefix}{name} {limits}, got {_shown(index(value))}", field=f"{prefix}{name}")
    assign(message, name, index(value) % NUM_SEEDS if is_whole else value, prefix)


def assign_biases(message: Any, name: str, biases: Mapping[int, float], prefix: str = "") -> None:
    """Set a field that maps token ids to numbers."""
    field, held = f"{prefix}{name}", getattr(message, name)
    try:
        held.update(biases)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{field}{_bias_problem(biases) or f': {error}'}", field=field) from None
    for token_id, bias in biases.items():
        _require_kept(field, bias, held[token_id], f" for token {token_id}")


def _bias_problem(biases: Any) -> str:
    """Return what to say of the first entry of a map that does not fit its field; "" if that is not known."""
    if not isinstance(biases, Mapping):
        return f" must map token ids to numbers, got {type(biases).__name__}"
    least, most = _RANGES[3]
    for token_id, bias in biases.items():
        if not isinstance(token_id, int) or not least <= token_id <= most:
            return f" must map token ids from {least} to {most}, got {_shown(token_id)}"
        if isinstance(bias, int) and bias.bit_length() > _MOST_FLOAT_BITS:
            return f" {_FLOAT_LIMITS}, got {_shown(bias)} for token {token_id}"
        if not isinstance(bias, SupportsFloat):
            return f" must map token ids to numbers, got {type(bias).__name__} for token {token_id}"
    return ""


def _require_kept(field: str, value: Any, held: Any, place: str = "") -> None:
    """Refuse a number that became infinite or 0 when its field rounded it to 32 bits."""
    if isinstance(held, float) and value != held and (held == 0 or math.isinf(held)):
        raise InvalidRequest(f"{field} {_FLOAT_LIMITS}, got {float(value)!r}{place}", field=field)


def extend(message: Any, name: str, values: Sequence[Any], prefix: str = "") -> None:
    """Append to a repeated field."""
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError, OverflowError) as error:
        told = _out_of_range(message, name, values) or f": {error}"
        raise InvalidRequest(f"{prefix}{name}{told}", field=f"{prefix}{name}") from None


def _out_of_range(message: Any, name: str, values: Sequence[Any]) -> str:
    """Return what to say of the first whole number that a field cannot hold; "" if there is none."""
    kind = message.DESCRIPTOR.fields_by_name[name].cpp_type
    whole = [value for value in values if isinstance(value, int)]
    if kind in _FLOATS:
        wrong = next((value for value in whole if value.bit_length() > _MOST_FLOAT_BITS), None)
        return "" if wrong is None else f" {_FLOAT_LIMITS}, got {_shown(wrong)}"
    if kind not in _RANGES:
        return ""
    least, most = _RANGES[kind]
    wrong = next((value for value in whole if not least <= value <= most), None)
    return "" if wrong is None else f" must be at least {least} and at most {most}, got {_shown(wrong)}"


def _shown(value: Any) -> str:
    """Return a value for an error, of a length that can be read. Python refuses to spell the longest numbers."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    return f"{value!r:.80}"


def as_json(value: Mapping[str, Any], field: str) -> str:
    """Return a value as JSON. Raises InvalidRequest, which names `field`, if JSON cannot hold it."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} must be JSON: {error}", field=field) from None
