"""The ways in which models write tool calls and reasoning: one file for each family of models.

    declaration      what such a file declares
    json_arguments   arguments that are JSON
    schema_types     types of values, for arguments that are not JSON
    hermes, ...      the families

A new format is a new file with `FORMATS`, a tuple of `ToolFormat`; no other file names it.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from specdec.contract.output_form import OutputForm, ReasoningFormat
from specdec.structured.tool_formats.declaration import ToolFormat
from specdec.structured.tool_formats.reasoning import REASONING_FORMATS


@cache
def tool_formats() -> dict[str, ToolFormat]:
    """Return all formats of tool calls by their names, in the order in which a template is compared with them."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {format_.name: format_ for module in modules for format_ in getattr(module, "FORMATS", ())}


def markers_of(form: OutputForm) -> tuple[str, ...]:
    """Return the texts that may be single tokens, and have a meaning in an output."""
    tools = tool_formats()[form.tool_format_name].markers if form.tool_format_name else ()
    return tools + (form.reasoning.markers if form.reasoning else ())


def reasoning_formats() -> dict[str, ReasoningFormat]:
    """Return all formats of reasoning by their names."""
    return {format_.name: format_ for format_ in REASONING_FORMATS}
