"""Demand a form of the output: JSON of a schema, choices, a regular expression; and read what cannot be enforced.

Start a system first: `specdec up --detach`. Needs `pip install pydantic`. `SPECDEC_ENDPOINT` names another system.
"""

from typing import Literal

from pydantic import BaseModel, Field

from specdec import Client, Constraint
from specdec.client import InvalidRequest

PROMPT = "import os"


class Ticket(BaseModel, extra="forbid"):
    """Bounds, and no further fields, let the JSON end: this small model knows nothing of tickets."""

    title: str = Field(max_length=12)
    priority: int = Field(ge=0, le=9)
    kind: Literal["bug", "feature"]


def main() -> None:
    with Client() as client:
        show_schema(client)
        show_choice_and_pattern(client)
        show_what_is_ignored(client)
        show_refusal(client)


def show_schema(client: Client) -> None:
    """Generate JSON of a pydantic model. A schema as a dictionary or as JSON text does as well."""
    ticket = Constraint.json_schema(Ticket)
    answer = client.generate(PROMPT, constraint=ticket, temperature=0, max_new_tokens=200)
    print(answer.text)
    print(repr(Ticket.model_validate_json(answer.text)), answer.finish_reason)


def show_choice_and_pattern(client: Client) -> None:
    """Generate one of some texts, and text that a regular expression matches as a whole."""
    for constraint in (Constraint.choice(["yes", "no"]), Constraint.regex("[a-f]{4}-[a-f]{2}")):
        print(client.generate(PROMPT, constraint=constraint, temperature=0).text)


def show_what_is_ignored(client: Client) -> None:
    """Ignore the keywords that cannot be enforced. The answer names them."""
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3, "uniqueItems": True}
    lenient = Constraint.json_schema(schema, is_lenient=True)
    answer = client.generate(PROMPT, constraint=lenient, temperature=0)
    print(answer.text, answer.constraint_warnings)


def show_refusal(client: Client) -> None:
    """Without leniency, a schema that cannot be enforced as a whole is refused before anything is generated."""
    try:
        client.generate(PROMPT, constraint=Constraint.json_schema({"type": "array", "uniqueItems": True}))
    except InvalidRequest as error:
        print(f"{error.reason}: {error}")


if __name__ == "__main__":
    main()
