"""Reads from a chat template how it writes tool calls: a conversation with two known calls is rendered once.

The prompt shows which format the template uses, and the details in which templates of one family differ. `coordinator`
renders the conversation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from specdec.contract.output_form import Layout
from specdec.contract.tools import ToolDefinition, Tools
from specdec.structured.tool_formats.declaration import ToolFormat

_CONTENT = "zqcontentqz"
_FIRST, _SECOND = "zqfirst", "zqsecond"
#: Longest text between two calls that is read as such.
_MAX_GAP_CHARACTERS = 8

#: Arguments of the first call. Their names are not in the order of the alphabet.
PROBED_ARGUMENTS = {"zqb": "zqvalue", "zqa": True, "zqc": None}

PROBED_TOOLS = Tools(
    tuple(
        ToolDefinition(name, "zq", '{"type": "object", "properties": {"zqb": {"type": "string"}}}')
        for name in (_FIRST, _SECOND)
    )
)


def probed_messages() -> list[dict[str, Any]]:
    """Return the conversation to render, in the form of OpenAI."""
    calls = [
        {"id": f"zq000000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(((_FIRST, PROBED_ARGUMENTS), (_SECOND, {"zqb": "zqvalue"})))
    ]
    return [
        {"role": "user", "content": "zq"},
        {"role": "assistant", "content": _CONTENT, "tool_calls": calls},
    ]


def single_call(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with its first call alone, for templates that refuse more."""
    user, assistant = messages
    return [user, assistant | {"tool_calls": assistant["tool_calls"][:1]}]


def first_fitting(rendered: str, formats: Iterable[ToolFormat]) -> tuple[ToolFormat, Layout] | None:
    """Return the first format in which a prompt writes its calls, with its layout there; None if none is."""
    for format_ in formats:
        if (layout := layout_in(rendered, format_)) is not None:
            return format_, layout
    return None


def layout_in(rendered: str, format_: ToolFormat) -> Layout | None:
    """Return the layout of a format in the rendered conversation; None if the calls there have another format."""
    start = rendered.find(format_.first_head + _FIRST + format_.middle)
    if start < 0:
        return None
    written = rendered[start + len(format_.first_head + _FIRST + format_.middle) :]
    read = format_.arguments.read_layout(written, format_.layout)
    if read is None:
        return None
    layout, num_characters = read
    between, found, _ = written[num_characters:].removeprefix(format_.tail).partition(format_.head + _SECOND)
    if found and written[num_characters:].startswith(format_.tail) and len(between) <= _MAX_GAP_CHARACTERS:
        layout = replace(layout, between=between)
    _, found, before = rendered[:start].rpartition(_CONTENT)
    if found and not before.strip():
        layout = replace(layout, before=before)
    return layout
