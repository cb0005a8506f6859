"""Copies of the built-in pair with the markers and the chat template of another family.

The markers take the ids of the vocabulary's last tokens, so the models need no new rows. The templates are written by
hand after those of the families' models, as far as tools and reasoning go.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.checkpoints.vocabulary import load_tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"

_HEADER = """
{%- macro shown(content) -%}{{ content if content is string else '' }}{%- endmacro -%}
{%- if tools %}<|system|>
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
{% endif -%}
"""

#: After the template of Qwen 2.5.
HERMES = (
    _HEADER
    + """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": "' }}{{ tool_call.name }}{{ '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|eos|>' }}
{%- elif message.role == 'tool' %}
{{- '<|user|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}
{{- '<|' + message.role + '|>\\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
)

#: After the template of Qwen 3. Its prompt can have the beginning of the reasoning, or an empty one.
HERMES_THINKING = (
    HERMES.replace(
        "{{- '<|assistant|>' }}\n{%- if message.content %}{{ '\\n' + message.content }}{% endif %}",
        """{{- '<|assistant|>\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content or '' }}""",
    )
    .replace(
        "{{- '\\n<tool_call>",
        "{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}\n{{- '<tool_call>",
    )
    .replace(
        "{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
        """{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}
{%- if begun %}{{ '<think>\\n' }}{% endif %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}""",
    )
)

#: After the template of Qwen 3.5.
QWEN_XML = (
    _HEADER
    + """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>\\n' }}{{ message.content or '' }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
{%- if loop.first and message.content %}{{ '\\n\\n' }}{% elif not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{%- for name, value in tool_call.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}
{{- value if value is string else (value | tojson if value is mapping or value is sequence else value | string) }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}
{%- endfor %}{{ '<|eos|>' }}
{%- elif message.role == 'tool' %}
{{- '<|user|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}
{{- '<|' + message.role + '|>\\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
)

#: After the template of Llama 3.1, which writes one call in a message.
LLAMA3 = (
    _HEADER
    + """
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set tool_call = message.tool_calls[0].function or message.tool_calls[0] %}
{{- '<|assistant|>\\n' }}{{ '{"name": "' + tool_call.name + '", ' }}{{ '"parameters": ' }}
{{- tool_call.arguments | tojson }}{{ '}' }}{{ '<|eos|>' }}
{%- elif message.role == 'tool' %}
{{- '<|user|>\\n' + message.content | tojson }}
{%- else %}
{{- '<|' + message.role + '|>\\n' + message.content }}{{ '<|eos|>' if message.role == 'assistant' else '' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
)

#: After the template of Mistral Nemo and of Mistral 7B v0.3, which write ids of nine characters.
MISTRAL = (
    _HEADER
    + """
{%- for message in messages %}
{%- if message.tool_calls %}
{{- '<|assistant|>' }}{{ '[TOOL_CALLS] [' }}
{%- for tool_call in message.tool_calls %}
{%- set out = (tool_call.function or tool_call) | tojson %}{{ out[:-1] }}
{%- if tool_call.id is not defined or tool_call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}{{ ', "id": "' + tool_call.id + '"}' }}
{{- ', ' if not loop.last else ']' }}
{%- endfor %}{{ '<|eos|>' }}
{%- elif message.role == 'tool' %}
{{- '<|user|>' + message.content }}
{%- else %}
{{- '<|' + message.role + '|>' + message.content }}{{ '<|eos|>' if message.role == 'assistant' else '' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
)

#: After newer templates of Mistral.
MISTRAL_NAMED = (
    _HEADER
    + """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>' }}{{ message.content or '' }}
{%- for tool_call in message.tool_calls or [] %}
{%- set function = tool_call.function or tool_call %}
{{- '[TOOL_CALLS]' + function.name + '[ARGS]' }}{{ function.arguments | tojson }}
{%- endfor %}{{ '<|eos|>' }}
{%- elif message.role == 'tool' %}
{{- '<|user|>' + message.content }}
{%- else %}
{{- '<|' + message.role + '|>' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
)

#: After the template of Gemma 4.
GEMMA4 = (
    """
{%- macro written(value) -%}
{%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is boolean -%}{{ 'true' if value else 'false' }}
{%- elif value is none -%}{{ 'null' }}
{%- elif value is mapping -%}
{{- '{' }}
{%- for key, each in value | dictsort %}{{ key }}:{{ written(each) }}{{ ',' if not loop.last else '' }}{% endfor %}
{{- '}' }}
{%- elif value is sequence -%}
{{- '[' }}{% for each in value %}{{ written(each) }}{{ ',' if not loop.last else '' }}{% endfor %}{{ ']' }}
{%- else -%}{{ value }}
{%- endif -%}
{%- endmacro -%}
"""
    + _HEADER
    + """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>\\n' }}{{ message.content or '' }}
{%- for tool_call in message.tool_calls or [] %}
{%- set function = tool_call.function or tool_call %}
{{- '<|tool_call>call:' + function.name }}{{ written(function.arguments) }}{{ '<tool_call|>' }}
{%- endfor %}{{ '<|eos|>' }}
{%- elif message.role == 'tool' %}
{{- '<|user|>\\n' + message.content }}
{%- else %}
{{- '<|' + message.role + '|>\\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
)

#: By format: the template, and the markers that are tokens in its family's vocabularies.
FAMILIES = {
    "hermes": (HERMES, ("<tool_call>", "</tool_call>")),
    "qwen_xml": (QWEN_XML, ("<tool_call>", "</tool_call>")),
    "llama3_json": (LLAMA3, ()),
    "mistral": (MISTRAL, ("[TOOL_CALLS]",)),
    "mistral_named": (MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]")),
    "gemma4": (GEMMA4, ("<|tool_call>", "<tool_call|>", '<|"|>')),
}
THINK_MARKERS = ("<think>", "</think>")

#: Arguments of a tool, and the tools that tests offer.
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "São Paulo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Forecast", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


def write_family(directory: Path, role: str, template: str, markers: Sequence[str]) -> Path:
    """Copy a model of the built-in pair, with a template, and with markers that are single tokens; return the copy."""
    shutil.copytree(DEMO / role, directory, dirs_exist_ok=True)
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(_with_markers(json.loads(path.read_text()), markers)))
    (directory / "chat_template.jinja").write_text(template)
    return directory


def family_tokenizer(directory: Path, template: str, markers: Sequence[str]) -> Any:
    """Write and load the tokenizer of a family."""
    return load_tokenizer(write_family(directory, "target", template, markers))


def _with_markers(tokenizer: dict[str, Any], markers: Sequence[str]) -> dict[str, Any]:
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    last_ids = sorted(vocabulary.values())[len(vocabulary) - len(markers) :]
    replaced = {token: token_id for token, token_id in vocabulary.items() if token_id in last_ids}
    for token in replaced:
        del vocabulary[token]
    tokenizer["model"]["merges"] = [merge for merge in merges if "".join(merge) not in replaced]
    for marker, token_id in zip(markers, last_ids, strict=True):
        vocabulary[marker] = token_id
        tokenizer["added_tokens"].append(
            {"id": token_id, "content": marker, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": not marker.startswith("<")}
        )
    return tokenizer
