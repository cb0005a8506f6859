"""The form that a request demands of its output (docs/protocol.md section 11).

A constraint comes with a request, travels once to each replica, and is known there by its identity.
`specdec.structured` turns it into the masks of legal tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that an output must have."""

    kind: ConstraintKind
    text: str = ""
    """JSON schema, regular expression, JSON array of choices, or grammar; "" for JSON_OBJECT."""
    is_lenient: bool = False
    """True if keywords of a JSON schema that cannot be enforced are ignored instead of refused."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, *, is_lenient: bool = False) -> Constraint:
        """Return a constraint to JSON of a schema, given as an object or as JSON text."""
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        return cls(ConstraintKind.JSON_SCHEMA, text, is_lenient)

    @classmethod
    def json_object(cls) -> Constraint:
        """Return a constraint to any JSON object."""
        return cls(ConstraintKind.JSON_OBJECT)

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Return a constraint to a regular expression, which the whole output matches."""
        return cls(ConstraintKind.REGEX, pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """Return a constraint to one of some texts."""
        return cls(ConstraintKind.CHOICE, json.dumps(list(texts), ensure_ascii=False))

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """Return a constraint to a Lark or GBNF grammar."""
        return cls(ConstraintKind.GRAMMAR, text)
