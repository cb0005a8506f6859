"""Hermes: Qwen 2.5, Qwen 3 and Hermes 2 Pro write calls as JSON between two tags."""

from specdec.contract.output_form import Layout
from specdec.structured.tool_formats.declaration import ToolFormat
from specdec.structured.tool_formats.json_arguments import JsonArguments

FORMATS = (
    ToolFormat(
        name="hermes",
        opener="<tool_call>",
        head='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        tail="}\n</tool_call>",
        arguments=JsonArguments(),
        layout=Layout(before="\n", between="\n"),
        markers=("<tool_call>", "</tool_call>"),
    ),
)
