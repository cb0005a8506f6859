"""Reads the types of a value from a JSON schema, for formats that do not write JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Keywords that say nothing about the text of a string.
_SILENT = frozenset(
    {"type", "title", "description", "default", "examples", "nullable", "deprecated", "enum", "const", "$ref"}
)
_MAX_REFERENCES = 32
_UNIONS = ("anyOf", "oneOf", "allOf")


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in place of a reference to it. Raises ValueError for what is not a schema of a value."""
    for _ in range(_MAX_REFERENCES):
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise ValueError(f"must hold JSON schemas, which are objects, got {ascii(schema)[:64]}")
        if "$ref" not in schema:
            return dict(schema)
        schema = _at(root, schema["$ref"])
    raise ValueError(f"must not hold more than {_MAX_REFERENCES} references one after another")


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the names of the types that a schema states; empty if it states none."""
    plain = resolved(schema, root)
    stated = plain.get("type")
    types = {stated} if isinstance(stated, str) else set(stated) if isinstance(stated, list) else set()
    values = plain.get("enum", [plain["const"]] if "const" in plain else [])
    if not types and isinstance(values, list):
        types = {_type_of(value) for value in values}
    if not types and depth < 8:
        for union in _UNIONS:
            for choice in plain.get(union) or ():
                types |= types_of(choice, root, depth + 1)
    return frozenset(name for name in types if isinstance(name, str))


def may_be_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return whether a value may be a string, or anything."""
    types = types_of(schema, root)
    return not types or "string" in types


def fixed_texts(schema: Any, root: Mapping[str, Any]) -> list[str] | None:
    """Return the texts of a schema that lists all of them; None for one that does not."""
    plain = resolved(schema, root)
    values = plain.get("enum", [plain["const"]] if "const" in plain else None)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        return None
    return values


def unenforced_text_keywords(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Return the keywords of a string's schema that a format of bare text does not enforce."""
    return sorted(resolved(schema, root).keys() - _SILENT)


def _at(root: Mapping[str, Any], reference: str) -> Any:
    """Return the part of a schema that a local reference names. Raises ValueError if there is none."""
    place: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        place = place.get(step) if isinstance(place, Mapping) else None
    if not reference.startswith("#") or place is None:
        raise ValueError(f"$ref must name a part of the schema itself, got {ascii(reference)[:80]}")
    return place


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "")
