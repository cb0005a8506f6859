"""Find what a JSON schema states and llguidance does not enforce, cannot spell, or could never end.

llguidance refuses most keywords that it cannot enforce. It passes over the ones found here: keywords of older drafts,
formats of numbers, keywords that are misspelled in case, and patterns that its regular expressions read otherwise.
`grammar` calls `prepare`; `admission` calls `problem_of`, in a process that can be killed, because a schema may be
large.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.structured.one_of import merge_exclusive

#: Keywords that restrict the instance and that llguidance passes over.
_PASSED_OVER = frozenset({"contentEncoding", "contentMediaType", "contentSchema", "disallow", "divisibleBy", "extends"})

#: Keywords that restrict the instance and that llguidance either enforces or refuses.
_RESTRICTING = _PASSED_OVER | {
    "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "contains", "dependencies",
    "dependentRequired", "dependentSchemas", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "if",
    "items", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains", "minItems", "minLength",
    "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern", "patternProperties", "prefixItems",
    "properties", "propertyNames", "required", "then", "type", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems",
}  # fmt: skip
_RESTRICTING_BY_LOWER_CASE = {keyword.lower(): keyword for keyword in _RESTRICTING}

#: Formats that restrict texts alone, so that another type satisfies them.
_TEXT_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf")

#: Ranges of integer formats. llguidance has no regular expression for numbers near the ends of int64, so these are not
#: written.
_RANGES = {"int32": (-(1 << 31), (1 << 31) - 1), "int64": (-(10**18), 10**18)}

#: Formats that a draft of JSON Schema, OpenAPI or llguidance defines. Others are annotations.
_DEFINED_FORMATS = _TEXT_FORMATS | {
    "binary", "byte", "char", "color", "decimal", "decimal128", "double", "double-int", "float", "host-name",
    "idn-email", "idn-hostname", "int16", "int32", "int64", "int8", "ip-address", "iri", "iri-reference",
    "json-pointer", "password", "phone", "regex", "relative-json-pointer", "style", "uint16", "uint32", "uint64",
    "uint8", "uri-reference", "uri-template", "utc-millisec",
}  # fmt: skip

#: Formats of numbers that every number of JSON has.
_NUMBER_FORMATS = frozenset({"float", "double"})

#: Inside a class of characters, what Rust's regular expressions read as a nested class or an operation on sets, and
#: those of JSON schemas as characters.
_SET_OPERATION = re.compile(r"\\.|(?P<found>\[|&&|--|~~)", re.DOTALL)

#: Control characters that have a short escape. Outputs contain no other, because `\u` escapes are not allowed: a
#: property name that is spelled with one would pass for another name.
_SHORT_ESCAPES = "\b\t\n\f\r"

Schema = Mapping[str, Any]


def problem_of(schema: dict[str, Any], *, is_lenient: bool) -> str | None:
    """Return why a schema, which llguidance can read, cannot be enforced; None if it can.

    Args:
        schema: a JSON schema whose ranges are stated.
        is_lenient: true to pass over restrictions that cannot be enforced, but not over what no output could satisfy.
    """
    parts = list(_parts(schema, "#"))
    checks = (_unspellable,) if is_lenient else (_unspellable, _passed_over, _misread_pattern, _miscounted)
    for path, part in parts:
        for check in checks:
            if (problem := check(part)) is not None:
                keyword, reason = problem
                return f"cannot be enforced at {path}/{_escaped(keyword)}: {reason}"
    refs = {part["$ref"] for _, part in parts if isinstance(part.get("$ref"), str)}
    if not _can_end(schema, _refs_that_end(schema, refs)):
        return "is recursive without end: no text of finite length satisfies it; make a property of the cycle optional"
    return None


def prepare(schema: dict[str, Any]) -> None:
    """Write a schema, in place, so that llguidance enforces what JSON Schema says.

    Integer formats become bounds, formats that are not defined are left out, and alternatives that exclude each other
    become `anyOf`. Defined formats of texts are left to llguidance.
    """
    parts = [part for _, part in _parts(schema, "#")]
    _state_ranges(parts)
    for part in parts:
        if _has_undefined_format(part):
            del part["format"]
    merge_exclusive(parts, schema)


def undefined_formats(schema: dict[str, Any]) -> list[str]:
    """Return a sentence for each format that is not defined, which restricts nothing by JSON Schema's rules."""
    return [
        f"{path}/format: the format {ascii(part['format'])[:64]} is not defined by JSON Schema and restricts nothing"
        for path, part in _parts(schema, "#")
        if _has_undefined_format(part)
    ]


def _has_undefined_format(schema: Schema) -> bool:
    return isinstance(schema.get("format"), str) and schema["format"] not in _DEFINED_FORMATS


def _state_ranges(parts: Sequence[dict[str, Any]]) -> None:
    for part in parts:
        types = _types(part)
        if part.get("format") in _RANGES and types is not None and "string" not in types:
            low, high = _RANGES[part.pop("format")]
            part["minimum"] = max(part.get("minimum", low), low)
            part["maximum"] = min(part.get("maximum", high), high)


def _parts(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the schema and all schemas within it, with their JSON pointers."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword in _SCHEMAS_BY_NAME:
        for name, part in _mapping(schema.get(keyword)).items():
            yield from _parts(part, f"{path}/{keyword}/{_escaped(name)}")
    for keyword in _SCHEMAS:
        value = schema.get(keyword)
        if isinstance(value, Mapping):
            yield from _parts(value, f"{path}/{keyword}")
        elif isinstance(value, list):
            for index, part in enumerate(value):
                yield from _parts(part, f"{path}/{keyword}/{index}")


def _escaped(name: str) -> str:
    """Return a name as a part of a JSON pointer, of printable characters."""
    return ascii(name.replace("~", "~0").replace("/", "~1"))[1:-1][:100]


def _passed_over(schema: Schema) -> tuple[str, str] | None:
    for keyword in schema:
        if keyword in _PASSED_OVER:
            return keyword, "this keyword is not supported; leave it out"
        meant = _RESTRICTING_BY_LOWER_CASE.get(keyword.lower())
        if meant not in (None, keyword):
            return keyword, f"no such keyword; write {meant}"
    if isinstance(schema.get("required"), bool):
        return "required", "a truth value is of draft 3; list the required names in the object's own required"
    if schema.get("nullable") is True:
        return "nullable", 'this keyword is not supported; list "null" among the types'
    return _passed_over_format(schema)


def _passed_over_format(schema: Schema) -> tuple[str, str] | None:
    format_ = schema.get("format")
    types = _types(schema)
    known = _TEXT_FORMATS | _NUMBER_FORMATS
    if isinstance(format_, str) and format_ not in known and types is not None and "string" not in types:
        return "format", f"the format {ascii(format_)[:64]} is not supported; state the range with minimum and maximum"
    return None


def _misread_pattern(schema: Schema) -> tuple[str, str] | None:
    names = schema.get("patternProperties")
    patterns = [("pattern", schema.get("pattern")), *(("patternProperties", name) for name in _mapping(names))]
    for keyword, pattern in patterns:
        if isinstance(pattern, str) and (found := _misread_in(pattern)):
            return keyword, f"{found} would be read differently than JSON schema does; write it with a backslash"
    return None


def _misread_in(pattern: str) -> str | None:
    """Return what the pattern has within a class of characters and Rust reads otherwise; None if there is nothing."""
    position = 0
    while position < len(pattern):
        if pattern[position] == "[":
            end = _end_of_class(pattern, position)
            inside = pattern[position + 1 : end]
            if inside in ("", "^"):
                return f"the class [{inside}]"
            if matched := next((match for match in _SET_OPERATION.finditer(inside) if match["found"]), None):
                return f"{matched['found']} within brackets"
            position = end
        position += 2 if pattern[position : position + 1] == "\\" else 1
    return None


def _end_of_class(pattern: str, start: int) -> int:
    """Return the position of the bracket that ends the class of characters which begins at `start`."""
    position = start + 1
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position


def _miscounted(schema: Schema) -> tuple[str, str] | None:
    """Find a count of properties that a name which occurs twice would satisfy. llguidance lets free names repeat."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(set(required)) if isinstance(required, list) else 0
    is_open = schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))
    if is_open and isinstance(least, int) and least - num_required >= 2:
        return "minProperties", "names that are not listed could repeat; list the names and require them"
    return None


def _unspellable(schema: Schema) -> tuple[str, str] | None:
    stated = {keyword: schema.get(keyword) for keyword in ("const", "enum", "required")}
    stated["properties"] = list(_mapping(schema.get("properties")))
    for keyword, value in stated.items():
        for text in _texts(value):
            for character in text:
                if (character < " " and character not in _SHORT_ESCAPES) or character == "\x7f":
                    return keyword, f"outputs cannot spell the control character U+{ord(character):04X}; leave it out"
    return None


def _texts(value: Any) -> Iterator[str]:
    """Return the texts within a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _refs_that_end(schema: Schema, refs: set[str]) -> dict[str, bool]:
    """Return, of each reference, whether a finite instance of its target exists."""
    targets = {ref: _target(schema, ref) for ref in refs}
    ends = {ref: target is None for ref, target in targets.items()}  # a target elsewhere is llguidance's to judge
    changed = True
    while changed:
        changed = False
        for ref, target in targets.items():
            if not ends[ref] and _can_end(target, ends):
                ends[ref] = changed = True
    return ends


def _target(schema: Schema, ref: str) -> Any:
    """Return what a JSON pointer names; None for another reference, or one to nothing."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    target: Any = schema
    for name in ref.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(name)
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            return None
    return target


def _can_end(schema: Any, ends: Mapping[str, bool]) -> bool:
    """Return whether a finite instance exists, as far as references decide it.

    Args:
        schema: a schema.
        ends: of each reference, whether a finite instance of its target is known to exist.
    """
    if not isinstance(schema, Mapping):
        return True
    if not ends.get(schema.get("$ref", ""), True):
        return False
    if not all(_can_end(part, ends) for part in _list(schema, "allOf")):
        return False
    for keyword in ("anyOf", "oneOf"):
        if (parts := _list(schema, keyword)) and not any(_can_end(part, ends) for part in parts):
            return False
    types = _types(schema)
    if types is None or "const" in schema or "enum" in schema:
        return True
    ways = {"object": _object_can_end, "array": _array_can_end}
    return any(ways[type_](schema, ends) if type_ in ways else True for type_ in types)


def _object_can_end(schema: Schema, ends: Mapping[str, bool]) -> bool:
    named = _mapping(schema.get("properties"))
    others = [schema.get("additionalProperties", True), *_mapping(schema.get("patternProperties")).values()]
    for name in _list(schema, "required"):
        possible = [named[name]] if name in named else others
        if not any(_can_end(part, ends) for part in possible):
            return False
    least = schema.get("minProperties")
    return not least or any(_can_end(part, ends) for part in [*named.values(), *others] if part is not False)


def _array_can_end(schema: Schema, ends: Mapping[str, bool]) -> bool:
    least = schema.get("minItems", 0)
    items = schema.get("items", True)
    first = items if isinstance(items, list) else _list(schema, "prefixItems")
    rest = schema.get("additionalItems", True) if isinstance(items, list) else items
    needed = [*first[: int(least)], *([rest] if least > len(first) else ())]
    return all(_can_end(part, ends) for part in needed)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(schema: Schema, keyword: str) -> Sequence[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else ()


def _types(schema: Schema) -> set[str] | None:
    """Return the stated types; None if any is possible."""
    types = schema.get("type")
    return {types} if isinstance(types, str) else set(types) if isinstance(types, list) else None
