"""Structural tags: free text in which certain beginnings start a part of a fixed form.

The text of such a constraint is the JSON object that vLLM's API has for it: `structures`, each with `begin`, the JSON
`schema` of what follows, and `end`; and `triggers`, texts with which the beginnings start. Text is free up to the end
of a trigger. From there the grammar leaves no choice but one of the structures that begin with it. `grammar` calls this
module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specdec.contract.constraint import Constraint

#: Limit on the structures, and on the triggers.
MAX_TAGS = 128

_ANY_TEXT = r"/(.|\n)*/"


class Structure(NamedTuple):
    """A part of a fixed form."""

    begin: str
    schema: Constraint
    """Schema of the JSON between `begin` and `end`."""
    end: str


class StructuralTags(NamedTuple):
    """The contents of a constraint of this kind."""

    structures: tuple[Structure, ...]
    triggers: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> StructuralTags:
        """Return what a constraint's text states. Raises ValueError, with what must be changed."""
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("must be an object with structures and triggers")
        if "format" in value:
            raise ValueError("has format, which is not supported: state structures and triggers")
        if unknown := value.keys() - {"type", "structures", "triggers"}:
            raise ValueError(f"has unknown members: {', '.join(sorted(unknown))[:200]}")
        triggers = tuple(_text(each, "triggers") for each in _list(value, "triggers"))
        structures = tuple(_structure(each) for each in _list(value, "structures"))
        for structure in structures:
            if sum(structure.begin.startswith(trigger) for trigger in triggers) != 1:
                raise ValueError(f"needs exactly one trigger for the beginning {ascii(structure.begin)[:200]}")
        for trigger in triggers:
            if not any(structure.begin.startswith(trigger) for structure in structures):
                raise ValueError(f"has the trigger {ascii(trigger)[:200]}, with which no structure begins")
        return cls(structures, triggers)

    def grammar(self, json_expression: Callable[[Constraint], str]) -> str:
        """Return the grammar in llguidance's variant of Lark.

        Args:
            json_expression: returns the expression for JSON of a schema.
        """
        parts = " | ".join(f"tag{index}" for index in range(len(self.triggers)))
        lines = [f"start: ({parts})* TEXT", f"TEXT: {_ANY_TEXT}"]
        for index, trigger in enumerate(self.triggers):
            lines.append(f"trigger{index}[lazy]: TEXT {_quoted(trigger)}")
            lines.append(f"tag{index}: trigger{index} ({' | '.join(self._following(trigger, json_expression))})")
        return "\n".join(lines)

    def _following(self, trigger: str, json_expression: Callable[[Constraint], str]) -> Iterator[str]:
        """Yield what may follow a trigger."""
        for begin, schema, end in self.structures:
            if begin.startswith(trigger):
                yield f"{_quoted(begin[len(trigger) :])} {json_expression(schema)} {_quoted(end)}"


def _structure(value: Any) -> Structure:
    if not isinstance(value, Mapping) or value.keys() != {"begin", "schema", "end"}:
        raise ValueError("needs begin, schema and end in each of its structures, and nothing else")
    if not isinstance(value["schema"], dict | bool):
        raise ValueError("needs an object as the schema of each structure")
    begin, end = _text(value["begin"], "begin"), value["end"]
    if not isinstance(end, str):
        raise ValueError("needs a text as the end of each structure")
    return Structure(begin, Constraint.json_schema(value["schema"]), end)


def _list(value: Mapping[str, Any], name: str) -> Sequence[Any]:
    listed = value.get(name)
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_TAGS:
        raise ValueError(f"needs a list of 1 to {MAX_TAGS} {name}")
    return listed


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"needs texts that are not empty as {name}")
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
