"""Types and fields that requests of several routes share.

Numbers and flags are strict: the text "1" is refused as a number. 2.0 is an integer, because languages with one type of
number write it so. A field that is null is absent, at every depth. Unknown fields are ignored, as OpenAI does, unless
they would change the output. The coordinator checks ranges, and its errors name field and limit; fields that it does
not know are checked here. A list is refused at its first wrong element, because an error object for each of a million
elements would take a minute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

from gateway.schemas.foreign_fields import changes_text, constrains_output, is_carrier
from specdec.contract.errors import InvalidRequest

_PLAIN = {"type": "text"}
#: Depth beyond that of any field in an object of the API.
_API_DEPTH = 16
#: Names of the arguments of a tool call, in the APIs of OpenAI and Anthropic.
_ARGUMENTS = ("arguments", "input")

_NO_TEXT = "this route generates no text"
_FOREIGN = "it would change the text, and this route has no such field; leave it out, or use the route's own"


def _whole(value: Any) -> Any:
    """Return a number without a fractional part as an integer, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_items(values: Any) -> Any:
    """Return a list whose numbers are as `_whole` returns them. Lists of integers, which are long, stay as they are."""
    return [*map(_whole, values)] if isinstance(values, list) and float in set(map(type, values)) else values


def without_nulls(value: Any) -> Any:
    """Return a value of JSON without the fields that are null. The arguments of a tool call are the caller's own."""
    return _without_nulls(value, _API_DEPTH)


def _without_nulls(value: Any, depth: int) -> Any:
    if depth and isinstance(value, dict):
        return {
            name: each if name in _ARGUMENTS else _without_nulls(each, depth - 1)
            for name, each in value.items()
            if each is not None
        }
    return [_without_nulls(each, depth - 1) for each in value] if depth and isinstance(value, list) else value


StrictInt = Annotated[int, Strict()]
WHOLE = BeforeValidator(_whole)
"""Comes after the bounds of a `StrictInt`, which the OpenAPI document would lack otherwise."""
Int = Annotated[StrictInt, WHOLE]
Positive = Annotated[StrictInt, Field(ge=1, lt=1 << 32), WHOLE]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
FreeObject = dict[str, Any]
"""Object whose fields are the caller's own, such as variables of a template: null is a value there."""
Object = Annotated[dict[str, Any], BeforeValidator(without_nulls)]
"""Object of the API."""

ItemT = TypeVar("ItemT")
Items = Annotated[list[ItemT], Field(fail_fast=True)]
TokenIds = Annotated[Items[Annotated[StrictInt, Field(ge=0, lt=1 << 32)]], BeforeValidator(_whole_items)]


def whole_number(text: str, limit: int) -> int | None:
    """Return a number in decimal ASCII digits that is below `limit`, or None for another text.

    The length is compared first, because `int` refuses texts of thousands of digits.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(limit))):
        return None
    number = int(text)
    return number if number < limit else None


class Request(BaseModel):
    """Base of request bodies and of the objects in them."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and None in fields.values():
            return {name: value for name, value in fields.items() if value is not None}
        return fields


class Body(Request):
    """Base of the whole bodies."""

    generates: ClassVar[bool] = False
    """The route generates text."""
    form_fields: ClassVar[str] = ""
    """Fields of the route that demand a form of the output."""
    carried: ClassVar[Mapping[str, Collection[str]]] = {}
    """Known fields in the objects that are carriers of foreign fields elsewhere."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_foreign(cls, fields: Any) -> Any:
        """Refuse unknown fields that would change the output, which must not be ignored. Raises InvalidRequest."""
        for name, reason in cls._foreign(fields, cls.model_fields) if isinstance(fields, dict) else ():
            raise ForeignField(f"{name} is not supported: {reason}", field=name, reason="UNSUPPORTED")
        return fields

    @classmethod
    def _foreign(cls, fields: Mapping[str, Any], known: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield the fields that are set and not known, if they would change the output, each with the reason."""
        for name, value in fields.items():
            if name not in known and value is not None:
                if constrains_output(name) and _demands(value):
                    yield name[:64], f"use {cls.form_fields}" if cls.form_fields else _NO_TEXT
                elif cls.generates and changes_text(name, value):
                    yield name[:64], _FOREIGN
            if is_carrier(name) and isinstance(value, dict):
                inside = cls._foreign(value, cls.carried.get(name, ()))
                yield from ((f"{name}.{inner}", reason) for inner, reason in inside)


class ForeignField(InvalidRequest):
    """A request has a field of another server, whose name is the caller's own."""


class StreamOptions(Request):
    """Contents of a stream beside its text."""

    include_usage: Flag = False
    """Send a last chunk with the usage of the whole request."""
    continuous_usage_stats: Flag = False
    """Send the usage so far with every chunk."""
    include_metrics: Flag = False
    """Send the counters of speculative decoding, as `return_metrics`."""


class Speculation(Request):
    """Choice of drafts and of their verification. An absent field is the server's choice."""

    mode: Text | None = None
    """Verification mode: off, rejection, block or coupled. Without it, a sampled request with a seed is served in the
    mode coupled, any other one in the server's default."""
    gamma: Int | None = None
    """Number of draft tokens a round."""
    draft_pool: Text | None = None
    """Draft pool of the request."""
    task: Text | None = None
    """Label of the kind of request, for routing and statistics; at most 64 characters."""


def unicode_text(text: str, field: str) -> str:
    """Return a text. Raises InvalidRequest for halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field}: is not valid Unicode at character {error.start}", field=field) from None
    return text


def _demands(constraint: Any) -> bool:
    """Return whether a constraint is set. An empty schema demands JSON; an object of nulls alone is absent."""
    return constraint == {} or without_nulls(constraint) not in (None, {}, _PLAIN)


def refuse(field: str, reason: str) -> InvalidRequest:
    """Return the error for a field that the server knows and does not support."""
    return InvalidRequest(f"{field} is not supported: {reason}", field=field, reason="UNSUPPORTED")
