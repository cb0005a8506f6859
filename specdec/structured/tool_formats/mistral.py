"""Mistral: a marker, then a JSON list of calls; newer models write the name between two markers.

Ids of calls have nine letters and digits: the templates refuse others.
"""

from dataclasses import replace

from specdec.contract.output_form import Layout
from specdec.structured.tool_formats.declaration import ToolFormat
from specdec.structured.tool_formats.json_arguments import JsonArguments

_LIST = ToolFormat(
    name="mistral",
    opener="[TOOL_CALLS]",
    list_open="[TOOL_CALLS] [",
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    list_close="]",
    arguments=JsonArguments(),
    layout=Layout(between=", "),
    markers=("[TOOL_CALLS]",),
    id_characters=9,
)

FORMATS = (
    _LIST,
    replace(_LIST, name="mistral_tight", list_open="[TOOL_CALLS]["),
    ToolFormat(
        name="mistral_named",
        opener="[TOOL_CALLS]",
        head="[TOOL_CALLS]",
        middle="[ARGS]",
        tail="",
        arguments=JsonArguments(),
        markers=("[TOOL_CALLS]", "[ARGS]"),
        id_characters=9,
    ),
)
