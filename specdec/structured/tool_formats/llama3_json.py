"""Llama 3: a call is a JSON object that is the whole output."""

from specdec.structured.tool_formats.declaration import ToolFormat
from specdec.structured.tool_formats.json_arguments import JsonArguments

FORMATS = (
    ToolFormat(
        name="llama3_json",
        opener='{"name": "',
        head='{"name": "',
        middle='", "parameters": ',
        tail="}",
        arguments=JsonArguments(),
        is_first_only=True,
        has_one_call=True,
    ),
)
