"""The form of one request's output: which of its text is reasoning, and which calls a tool.

The form is stored with the request, so that any coordinator, of any settings, gives the same parts of the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Layout:
    """Details that differ between chat templates of one family, read from the template itself.

    A turn that is rendered again has the tokens that were generated only if both agree in all of them.
    """

    before: str = ""
    """Text between the content of a message and its first call."""
    between: str = ""
    """Text between two calls."""
    item_separator: str = ", "
    key_separator: str = ": "
    true: str = "true"
    """Spelling of a parameter that is true, in formats that do not write JSON."""
    false: str = "false"
    null: str = "null"
    sorts_keys: bool = False
    """True if the template writes arguments in the order of their names."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around what a family of models writes before the answer."""

    name: str
    """Name for settings."""
    opener: str
    closer: str
    after_opener: str = ""
    """Text after the opener that belongs to it."""
    before_closer: str = ""
    after_closer: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be single tokens."""
        return (self.opener, self.closer)


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The parts that an output may have besides the answer."""

    tool_format_name: str = ""
    """Name of the format of calls (`specdec.structured.tool_formats`); "" if the output calls no tools."""
    layout: Layout = field(default_factory=Layout)
    reasoning: ReasoningFormat | None = None
    begins_in_reasoning: bool = False
    """True if the prompt ends after the beginning of the reasoning."""
    text_parameters: Mapping[str, tuple[str, ...]] | None = None
    """Parameters that are written as bare text, by the name of their tool; None without any."""
    names_tool: bool = False
    """True if the request names the tool that the output calls."""

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values that `read_form` reads back."""
        return asdict(self)


def read_form(fields: Mapping[str, Any]) -> OutputForm:
    """Return the form that `OutputForm.as_dict` gave. Raises KeyError or TypeError for anything else."""
    reasoning, text_parameters = fields["reasoning"], fields["text_parameters"]
    return OutputForm(
        tool_format_name=fields["tool_format_name"],
        layout=Layout(**fields["layout"]),
        reasoning=None if reasoning is None else ReasoningFormat(**reasoning),
        begins_in_reasoning=fields["begins_in_reasoning"],
        text_parameters=None
        if text_parameters is None
        else {name: tuple(parameters) for name, parameters in text_parameters.items()},
        names_tool=bool(fields.get("names_tool")),  # absent in requests that older versions stored
    )
