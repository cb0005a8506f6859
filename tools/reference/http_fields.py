"""Fields of HTTP requests, as list items: type, range, default and meaning from the OpenAPI document.

Ranges that only the coordinator checks are taken from its refusals, and so are the reasons of fields that the gateway
refuses: each field is given values until one of them is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from coordinator.front.raw_params import RawGenerationParams, RawSamplingParams
from coordinator.front.validation import ServingLimits, validate_request
from gateway.sampling import SamplingFields
from gateway.schemas.messages import Conversation
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import FILTER_RANGES, Mode
from tools.reference.markdown import code, item

_TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "object"}
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minItems": "at least {} entries",
    "maxItems": "at most {} entries",
    "maxProperties": "at most {} entries",
}
#: Numbers from here on are written as powers of two where they are.
_LARGE = 1 << 31
#: Values that are tried on a field until one is refused as not supported.
_PROBES = (True, False, 2, "x", ["x"], {"type": "x"})
_ONLY = re.compile(r"Only (?P<accepted>.+) is supported")
_REASON = "is not supported: "
_LIMITS = ServingLimits(1000, 2048, 16, (), Mode.REJECTION)

#: Requests beyond limits of the coordinator that no schema and no description tells, by the field's name over HTTP.
_BEYOND: Mapping[str, Sequence[RawGenerationParams]] = {
    **{
        name: [RawGenerationParams(prompt="x", sampling=RawSamplingParams(**{name: -1}))]  # type: ignore[arg-type]
        for name, range_ in FILTER_RANGES.items()
        if range_.words and name != "top_k"
    },
    "stop": [
        RawGenerationParams(prompt="x", sampling=RawSamplingParams(stop=stop)) for stop in (["x"] * 100, ["x" * 10000])
    ],
    "session_id": [RawGenerationParams(prompt="x", session_id="!")],
    "request_id": [RawGenerationParams(prompt="x", request_id="!")],
}


@dataclass(frozen=True)
class Body:
    """The request body of one route."""

    model: type[SamplingFields] | type[Conversation]
    required: Mapping[str, Any]
    """The least that a request must have."""


def field_items(
    schema: Mapping[str, Any], schemas: Mapping[str, Any], names: Sequence[str], *, level: int = 0
) -> Iterator[str]:
    """Yield an item for each of these fields of an object, with the fields of the objects in it.

    Args:
        schema: the object's schema.
        schemas: all schemas of the document, by name.
        names: the fields to describe.
        level: depth of the items.
    """
    for name in names:
        field = schema["properties"][name]
        notes = [_type(field), *_bounds(field), *_coordinator_limits(name)]
        if name in schema.get("required", ()):
            notes.append("required")
        elif field.get("default") is not None:
            notes.append(f"default {code(json.dumps(field['default']))}")
        yield item(f"{code(name)} ({', '.join(notes)})", field.get("description", ""), level=level)
        if inner := _reference(field):
            inside = schemas[inner]
            yield from field_items(inside, schemas, [*inside["properties"]], level=level + 1)


def shared_names(bodies: Sequence[Body], schemas: Mapping[str, Any]) -> list[str]:
    """Return the sampling fields that have the same description in the requests of all routes."""
    first, *others = (schemas[body.model.__name__]["properties"] for body in bodies)
    return [name for name in SamplingFields.model_fields if all(each[name] == first[name] for each in others)]


def refusals(body: Body, names: Sequence[str], schema: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return how each of these fields that is refused is written, and why it is refused, by name."""
    found = {}
    for name in names:
        if told := _refusal(body, name):
            path, reason = told
            found[name] = (f"{code(path)}{_accepted(schema['properties'][name])}", reason)
    return found


def refusal_items(refused: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return an item for each reason, with the fields that are refused for it."""
    by_reason: dict[str, list[str]] = {}
    for head, reason in refused.values():
        by_reason.setdefault(reason, []).append(head)
    return [item(", ".join(heads), reason[:1].upper() + reason[1:]) for reason, heads in by_reason.items()]


def _refusal(body: Body, name: str) -> tuple[str, str] | None:
    """Return the path at fault and the reason why a value of the field is not supported; None if all values are."""
    for value in _PROBES:
        try:
            body.model.model_validate({**body.required, name: value}).require_supported()
        except ValidationError:
            continue
        except InvalidRequest as error:
            if error.reason == "UNSUPPORTED" and error.field.partition(".")[0] == name:
                return error.field, error.message.partition(_REASON)[2]
    return None


def _accepted(field: Mapping[str, Any]) -> str:
    if found := _ONLY.search(field.get("description", "")):
        return f" (only {code(found['accepted'])} is accepted)"
    return f" (only {code(field['default'])} is accepted)" if field.get("default") is not None else ""


def _type(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        kinds = [_type(each) for each in field["anyOf"] if each.get("type") != "null"]
        *first, last = dict.fromkeys(kinds)
        return f"{', '.join(first)} or {last}" if first else last
    if "const" in field or "enum" in field:
        return " or ".join(code(json.dumps(value)) for value in field.get("enum", [field.get("const")]))
    if "$ref" in field:
        return "object"
    if field.get("type") == "array":
        return f"list of {_plural(_type(field['items']))}"
    return _TYPES.get(field.get("type", ""), "any value")


def _plural(kind: str) -> str:
    first, space, rest = kind.partition(" ")
    return f"{first if first == 'any' else first + 's'}{space}{rest}".replace("any value", "any values")


def _bounds(field: Mapping[str, Any]) -> Iterator[str]:
    """Yield the bounds of a field, or of the first of its alternatives that has any."""
    for each in (field, *field.get("anyOf", ())):
        found = [_bound(text, each[name]) for name, text in _BOUNDS.items() if name in each]
        if found:
            yield from found
            return


def _bound(text: str, value: float) -> str:
    told = text.format(_number(value))
    return told.replace("entries", "entry") if value == 1 else told


def _number(value: float) -> str:
    whole = int(value)
    if abs(whole) >= _LARGE and abs(whole).bit_count() == 1:
        return f"{'-' if whole < 0 else ''}2^{abs(whole).bit_length() - 1}"
    return f"{whole:,}" if whole == value else f"{value:g}"


def _coordinator_limits(name: str) -> Iterator[str]:
    """Yield the limits of a field in the words of the coordinator's refusals."""
    for raw in _BEYOND.get(name, ()):
        try:
            validate_request(raw, _LIMITS)
        except InvalidRequest as error:
            limit = error.message.removeprefix(error.field).partition(", got")[0].strip()
            yield limit.removeprefix("must be ").removeprefix("must hold ")


def _reference(field: Mapping[str, Any]) -> str:
    """Return the name of the schema of the objects in a field; "" if there is none."""
    for each in (field, *field.get("anyOf", ())):
        reference = each.get("$ref") or each.get("items", {}).get("$ref")
        if reference:
            return str(reference).rpartition("/")[2]
    return ""
