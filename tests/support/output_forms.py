"""Forms that tests demand of the demo model's output, whose JSON is short enough to end by itself."""

from __future__ import annotations

from typing import Any, Literal

import httpx2
from pydantic import BaseModel, Field


class Ticket(BaseModel, extra="forbid"):
    """Bounds of its own; without further fields, of which a small model finds no end."""

    title: str = Field(max_length=12)
    priority: int = Field(ge=0, le=9)
    kind: Literal["bug", "feature"]
    parts: list[Literal["draft", "target"]] = Field(max_length=2)
    owner: str | None = Field(max_length=5)


class Verdict(BaseModel, extra="forbid"):
    """Without bounds, which some clients leave out of the schema."""

    answer: Literal["yes", "no"]
    is_sure: bool


#: Enough for either, with white space everywhere.
ENOUGH_TOKENS = 400
#: A schema with a keyword that cannot be enforced, and what the answer says of it.
LENIENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no", None]}},
    "required": ["answer"],
    "additionalProperties": False,
    "not": {"required": ["x"]},
}
WARNINGS = ['Unimplemented keys: ["not"]']


def closing_bias(http: str) -> dict[str, int]:
    """A `logit_bias` that ends an object at `http` soon: one of the model's own choice has no bound."""
    tokens = httpx2.post(f"http://{http}/tokenize", json={"prompt": "}"}).json()["tokens"]
    return {str(tokens[-1]): 50}
