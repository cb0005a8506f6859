"""`oneOf` of alternatives that exclude each other, which is the same as `anyOf`.

llguidance enforces `anyOf` and refuses `oneOf`. Discriminated unions and unions of types are written with `oneOf`, and
no value satisfies two of their alternatives. Called by `grammar`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

#: Depth to which the properties of two alternatives are compared. References are followed, so there must be a limit.
_MAX_DEPTH = 4

_TYPES_OF_PYTHON = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}


def merge_exclusive(parts: Sequence[dict[str, Any]], root: Mapping[str, Any]) -> None:
    """Replace each `oneOf` by `anyOf`, in place, if no value can satisfy two of its alternatives.

    Args:
        parts: the schemas within `root`, itself included.
        root: the whole schema, to which references point.
    """
    for part in parts:
        alternatives = part.get("oneOf")
        if not isinstance(alternatives, list) or not _are_exclusive(alternatives, root):
            continue
        del part["oneOf"]
        if "anyOf" in part:
            part["allOf"] = [*part.get("allOf", []), {"anyOf": alternatives}]
        else:
            part["anyOf"] = alternatives


def _are_exclusive(alternatives: Sequence[Any], root: Mapping[str, Any]) -> bool:
    return all(
        _exclude(first, second, root, _MAX_DEPTH)
        for index, first in enumerate(alternatives)
        for second in alternatives[index + 1 :]
    )


def _exclude(first: Any, second: Any, root: Mapping[str, Any], depth: int) -> bool:
    """Return whether no value satisfies both schemas; False if that is not certain."""
    first, second = _resolved(first, root), _resolved(second, root)
    if first is False or second is False:
        return True
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return False
    types = _types(first), _types(second)
    if types[0] is not None and types[1] is not None and not types[0] & types[1]:
        return True
    values = _values(first), _values(second)
    if values[0] is not None and values[1] is not None and not values[0] & values[1]:
        return True
    if depth == 0 or types != ({"object"}, {"object"}):
        return False
    required = _names(first.get("required")) & _names(second.get("required"))
    properties = _mapping(first.get("properties")), _mapping(second.get("properties"))
    return any(
        _exclude(properties[0][name], properties[1][name], root, depth - 1)
        for name in required & properties[0].keys() & properties[1].keys()
    )


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a lone local reference points to; any other schema unchanged."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for name in reference[2:].split("/"):
            target = _mapping(target).get(name.replace("~1", "/").replace("~0", "~"))
        if target is None:
            return schema
        schema = target
    return schema


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the types of the values of a schema; None if they are not stated."""
    stated = schema.get("type")
    if isinstance(stated, str):
        return {"number" if stated == "integer" else stated}
    if isinstance(stated, list):
        return {"number" if each == "integer" else str(each) for each in stated}
    listed = _listed(schema)
    if listed is None:
        return None
    return {_TYPES_OF_PYTHON.get(type(value), "null") for value in listed}


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the values of a schema as JSON, equal numbers as equal texts; None if they are not listed."""
    listed = _listed(schema)
    return None if listed is None else {json.dumps(_plain(value), sort_keys=True) for value in listed}


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _plain(value: Any) -> Any:
    """Return a value in which 1.0 is 1, as JSON schema compares numbers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value


def _names(value: Any) -> set[str]:
    return {each for each in value if isinstance(each, str)} if isinstance(value, list) else set()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
