"""Reads messages into dataclasses whose fields have the names of the message's fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

KindT = TypeVar("KindT")


def read_fields(kind: type[KindT], message: Message, **others: Any) -> KindT:
    """Return the dataclass of a message. `others` are the fields whose values are not those of the message.

    An optional field that was not sent is None. A repeated field is a view of the message, so that its length can be
    checked before a loop over it.
    """
    names = (field.name for field in fields(kind) if field.name not in others)  # type: ignore[arg-type]
    return kind(**{name: _sent(message, name) for name in names}, **others)


def _sent(message: Message, field: str) -> Any:
    is_optional = message.DESCRIPTOR.fields_by_name[field].has_presence
    return None if is_optional and not message.HasField(field) else getattr(message, field)
