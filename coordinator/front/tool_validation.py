"""Checks the tools and the constraint of a request, as far as that needs no tokenizer.

`validation` and `servicer` call it on decoded messages. What a model's format makes of checked tools is decided in
`text/output_forms`, and constraints are compiled in `text/constraints`.
"""

from __future__ import annotations

import json
import re

from coordinator.front.raw_params import RawTools
from coordinator.requests import GenerationRequest
from specdec.contract.constraint import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.contract.tools import ToolChoice, ToolDefinition, Tools

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARACTERS = 1 << 16

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_num_tools(num_tools: int) -> None:
    """Raise InvalidRequest for a number of tools that no request may have. Called before the loop over them."""
    if not 1 <= num_tools <= MAX_TOOLS:
        raise _invalid("tools.definitions", f"must hold 1 to {MAX_TOOLS} tools, got {num_tools}")


def validate_tools(raw: RawTools, *, has_messages: bool) -> Tools:
    """Check the tools of a request.

    Raises:
        InvalidRequest: a field is outside its limits, the choice names no tool of the request, or the input is not a
            conversation.
    """
    if not has_messages:
        raise _invalid("tools", "needs messages, because the chat template tells the model of them")
    names: set[str] = set()
    for index, tool in enumerate(raw.definitions):
        _check_definition(f"tools.definitions[{index}]", tool, names)
        names.add(tool.name)
    if raw.choice not in (0, *ToolChoice):
        raise _invalid("tools.choice", f"must be a ToolChoice, got {raw.choice}")
    choice = ToolChoice(raw.choice or ToolChoice.AUTO)
    _check_choice(choice, raw.name, names)
    is_parallel = True if raw.parallel is None else raw.parallel
    return Tools(tuple(raw.definitions), choice, raw.name, is_parallel)


def check_follows_constraints(request: GenerationRequest, *, is_possible: bool) -> None:
    """Refuse a constraint, or tools, that no connected target can follow. Raises Unsupported."""
    if request.sampling.constraint is not None and not is_possible:
        field = "constraint" if request.tools is None else "tools"
        raise Unsupported(
            f"{field} cannot be followed by the connected targets: use targets with --backend own or llama-cpp that "
            "have llguidance (specdec-serving[structured])",
            field=field,
        )


def check_constraint(constraint: Constraint | None) -> None:
    """Raise InvalidRequest for a constraint of a kind that clients cannot send."""
    if constraint is not None and constraint.kind is ConstraintKind.STRUCTURAL:
        raise _invalid("constraint.kind", "must not be STRUCTURAL, which the server makes of tools; send GRAMMAR")


def _check_definition(field: str, tool: ToolDefinition, names: set[str]) -> None:
    if not _NAME.fullmatch(tool.name):
        raise _invalid(
            f"{field}.name",
            f"must be 1 to 64 of A-Z a-z 0-9 _ -, got {len(tool.name)} characters: {ascii(tool.name)[:80]}",
        )
    if tool.name in names:
        raise _invalid(f"{field}.name", f"must differ from the names of the other tools, got {tool.name!r} again")
    if len(tool.description) > MAX_DESCRIPTION_CHARACTERS:
        raise _invalid(
            f"{field}.description",
            f"must have at most {MAX_DESCRIPTION_CHARACTERS} characters, got {len(tool.description)}",
        )
    _check_parameters(f"{field}.parameters_json", tool.parameters_json)


def _check_parameters(field: str, text: str) -> None:
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_CONSTRAINT_BYTES:
        raise _invalid(field, f"must be at most {MAX_CONSTRAINT_BYTES} bytes, got {num_bytes}")
    if not text:
        return
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(field, f"must be JSON: {ascii(str(error))[1:-1][:200]}") from error
    if not isinstance(schema, dict):
        raise _invalid(field, f"must be a JSON schema, which is an object, got {type(schema).__name__}")
    if schema.get("type", "object") != "object":
        raise _invalid(field, f"must be a schema of the type object, got {ascii(schema['type'])[:64]}")
    for name, type_ in (("properties", dict), ("required", list)):
        if not isinstance(schema.get(name, type_()), type_):
            raise _invalid(field, f"must hold {name} as a JSON {'object' if type_ is dict else 'list'}")


def _check_choice(choice: ToolChoice, name: str, names: set[str]) -> None:
    if choice is ToolChoice.NAMED and name not in names:
        known = ", ".join(sorted(names))
        raise _invalid("tools.name", f"must be one of the tools, which are {known[:200]}; got {ascii(name)[:80]}")
    if choice is not ToolChoice.NAMED and name:
        raise _invalid("tools.name", f"must be empty unless the choice is NAMED, got {ascii(name)[:80]}")


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {problem}", field=field)
