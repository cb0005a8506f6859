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

#: Number of comparisons in one schema, and of required names in them. Beyond it, alternatives count as overlapping.
_MAX_COMPARED = 200_000

_TYPES_OF_PYTHON = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}


def merge_exclusive(parts: Sequence[dict[str, Any]], root: Mapping[str, Any]) -> None:
    """Replace each `oneOf` by `anyOf`, in place, if no value can satisfy two of its alternatives.

    Args:
        parts: the schemas within `root`, itself included.
        root: the whole schema, to which references point.
    """
    comparison = _Comparison(root)
    for part in parts:
        alternatives = part.get("oneOf")
        if not isinstance(alternatives, list) or not comparison.are_exclusive(alternatives):
            continue
        del part["oneOf"]
        if "anyOf" in part:
            part["allOf"] = [*part.get("allOf", []), {"anyOf": alternatives}]
        else:
            part["anyOf"] = alternatives


class _Comparison:
    """Compares alternatives of one schema, with a limit on the work: pairs grow with the square of the schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _MAX_COMPARED
        self._known_values: dict[int, set[str]] = {}
        self._known_types: dict[int, set[str] | None] = {}
        """Values and types of the schemas that were compared, by their identity in memory."""

    def are_exclusive(self, alternatives: Sequence[Any]) -> bool:
        """Return whether no value satisfies two of the alternatives; False if that is not certain."""
        values = [self._values(self._resolved(each)) for each in alternatives]
        listed = [each for each in values if each is not None]
        if len(listed) == len(values) and len(set[str]().union(*listed)) == sum(map(len, listed)):
            return True
        return all(
            self._exclude(first, second, _MAX_DEPTH)
            for index, first in enumerate(alternatives)
            for second in alternatives[index + 1 :]
        )

    def _exclude(self, first: Any, second: Any, depth: int) -> bool:
        """Return whether no value satisfies both schemas; False if that is not certain."""
        first, second = self._resolved(first), self._resolved(second)
        if first is False or second is False:
            return True
        if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
            return False
        names = _names(first.get("required")), _names(second.get("required"))
        self._num_left -= 1 + len(names[0]) + len(names[1])
        if self._num_left < 0:
            return False
        types = self._types(first), self._types(second)
        if types[0] is not None and types[1] is not None and not types[0] & types[1]:
            return True
        values = self._values(first), self._values(second)
        if values[0] is not None and values[1] is not None and not values[0] & values[1]:
            return True
        if depth == 0 or types != ({"object"}, {"object"}):
            return False
        properties = _mapping(first.get("properties")), _mapping(second.get("properties"))
        return any(
            self._exclude(properties[0][name], properties[1][name], depth - 1)
            for name in names[0] & names[1]
            if name in properties[0] and name in properties[1]
        )

    def _resolved(self, schema: Any) -> Any:
        """Return the schema that a lone local reference points to; any other schema unchanged."""
        for _ in range(_MAX_DEPTH):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                return schema
            target: Any = self._root
            for name in reference[2:].split("/"):
                target = _mapping(target).get(name.replace("~1", "/").replace("~0", "~"))
            if target is None:
                return schema
            schema = target
        return schema

    def _types(self, schema: Mapping[str, Any]) -> set[str] | None:
        if id(schema) not in self._known_types:
            self._known_types[id(schema)] = _types(schema)
        return self._known_types[id(schema)]

    def _values(self, schema: Any) -> set[str] | None:
        """Return the values of a schema as JSON, equal numbers as equal texts; None if they are not listed."""
        if not isinstance(schema, Mapping) or (listed := _listed(schema)) is None:
            return None
        if id(schema) not in self._known_values:
            self._known_values[id(schema)] = {json.dumps(_plain(value), sort_keys=True) for value in listed}
        return self._known_values[id(schema)]


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
