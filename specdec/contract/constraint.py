"""The form that a request demands of its output (docs/protocol.md section 11).

A constraint comes with a request, travels once to each replica, and is known there by its identity.
`specdec.structured` turns it into the masks of legal tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

from specdec.contract.errors import InvalidRequest

#: Length of a constraint's identity, in bytes.
CONSTRAINT_ID_BYTES = 16

#: Limit on a constraint's text. Compiling takes about a second for one megabyte.
MAX_CONSTRAINT_BYTES = 1 << 19


class ConstraintKind(IntEnum):
    """Language of a constraint; values equal the proto's `ConstraintKind`."""

    JSON_SCHEMA = 1
    JSON_OBJECT = 2
    REGEX = 3
    CHOICE = 4
    GRAMMAR = 5
    STRUCTURAL = 6
    """A grammar that a coordinator made of a request's tools, reasoning and constraint. Clients cannot send it."""
    STRUCTURAL_TAG = 7


@runtime_checkable
class _Model(Protocol):
    """A pydantic model, which this package does not import."""

    def model_json_schema(self) -> dict[str, Any]:
        """Return the JSON schema."""
        ...


Schema = Mapping[str, Any] | str | bool | _Model | type[_Model]
"""A JSON schema: an object or true or false, its JSON text, or a pydantic model."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that an output must have."""

    kind: ConstraintKind
    text: str = ""
    """JSON schema, regular expression, JSON array of choices, grammar, or structural tags; "" for JSON_OBJECT."""
    is_lenient: bool = False
    """True if keywords of a JSON schema that cannot be enforced are ignored instead of refused."""

    @classmethod
    def json_schema(cls, schema: Schema, *, is_lenient: bool = False) -> Constraint:
        """Return a constraint to JSON of a schema.

        Args:
            schema: the schema as an object, as JSON text, or a pydantic model.
            is_lenient: ignore keywords that cannot be enforced, which `Completion.constraint_warnings` names, instead
                of refusing the schema.

        Raises:
            InvalidRequest: `schema` is something else, or an object that JSON cannot spell.
        """
        if isinstance(schema, _Model):
            schema = schema.model_json_schema()
        if not isinstance(schema, str | bool | Mapping):
            raise _wrong(
                "json_schema", f"must be an object, its JSON text or a pydantic model, got {type(schema).__name__}"
            )
        text = schema if isinstance(schema, str) else _json_of("json_schema", schema)
        return cls(ConstraintKind.JSON_SCHEMA, text, is_lenient)

    @classmethod
    def json_object(cls) -> Constraint:
        """Return a constraint to any JSON object."""
        return cls(ConstraintKind.JSON_OBJECT)

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Return a constraint to a regular expression, which the whole output matches. Raises InvalidRequest."""
        return cls(ConstraintKind.REGEX, _text_of("regex", pattern))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """Return a constraint to one of some texts. Raises InvalidRequest for a single text."""
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise _wrong("choice", f"must be a list of texts, got {type(texts).__name__}")
        return cls(ConstraintKind.CHOICE, _json_of("choice", [_text_of("choice", text) for text in texts]))

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """Return a constraint to a Lark or GBNF grammar, if the server accepts those. Raises InvalidRequest."""
        return cls(ConstraintKind.GRAMMAR, _text_of("grammar", text))

    @classmethod
    def structural_tag(cls, tags: Mapping[str, Any] | str) -> Constraint:
        """Return a constraint to free text in which certain beginnings start JSON of a schema. Raises InvalidRequest.

        Args:
            tags: vLLM's object, or its JSON text: `structures`, each with `begin`, `schema` and `end`, and `triggers`,
                texts with which the beginnings start.
        """
        if not isinstance(tags, str | Mapping):
            raise _wrong("structural_tag", f"must be an object or its JSON text, got {type(tags).__name__}")
        text = tags if isinstance(tags, str) else _json_of("structural_tag", tags)
        return cls(ConstraintKind.STRUCTURAL_TAG, text)

    def check_size(self) -> None:
        """Raise InvalidRequest (CONSTRAINT_INVALID) if the text is longer than the limit.

        Clients check it before they send it, because gRPC refuses a large message without naming a field.
        """
        num_bytes = len(self.text.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_CONSTRAINT_BYTES:
            problem = f"must be at most {MAX_CONSTRAINT_BYTES} bytes, got {num_bytes}"
            raise _wrong(self.kind.name.lower(), problem, reason="CONSTRAINT_INVALID")


def _json_of(kind: str, value: Any) -> str:
    try:
        return json.dumps(value if isinstance(value, bool | list) else dict(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(kind, f"cannot be written as JSON: {error}") from None


def _text_of(kind: str, text: Any) -> str:
    if not isinstance(text, str):
        raise _wrong(kind, f"must be text, got {type(text).__name__}")
    return text


def _wrong(kind: str, problem: str, *, reason: str = "") -> InvalidRequest:
    field = f"constraint.{kind}"
    return InvalidRequest(f"{field} {problem}", reason=reason, field=field)
