"""Types and fields that requests of several routes share.

Numbers and flags are strict: the text "1" is refused as a number. Unknown fields are ignored, as OpenAI does. The
coordinator checks ranges, and its errors name field and limit; fields that it does not know are checked here. A list is
refused at its first wrong element, because an error object for each of a million elements would take a minute.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict

from specdec.errors import InvalidRequest

Int = Annotated[int, Strict()]
Positive = Annotated[int, Strict(), Field(ge=1, lt=1 << 32)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
TokenId = Annotated[int, Strict(), Field(ge=0, lt=1 << 32)]
Object = dict[str, Any]

ItemT = TypeVar("ItemT")
Items = Annotated[list[ItemT], Field(fail_fast=True)]


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


class StreamOptions(Request):
    """Contents of a stream beside its text."""

    include_usage: Flag = False
    """Send a last chunk with the usage of the whole request."""
    continuous_usage_stats: Flag = False
    """Send the usage so far with every chunk."""
    include_metrics: Flag = False
    """Send the counters of speculative decoding with the last chunk."""


class Speculation(Request):
    """Choice of drafts and of their verification. An absent field is the server's choice."""

    mode: Text | None = None
    """Verification mode: off, rejection, block or coupled."""
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


def refuse(field: str, reason: str) -> InvalidRequest:
    """Return the error for a field that the server knows and does not support."""
    return InvalidRequest(f"{field} is not supported: {reason}", field=field, reason="UNSUPPORTED")
