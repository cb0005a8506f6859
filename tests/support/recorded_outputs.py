"""Outputs with calls in the form of each family, as the family's chat template writes the message.

Texts that look like markers stand in strings, and in the answer, spelled by ordinary tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from specdec.contract.output_form import Layout, OutputForm
from specdec.contract.tools import OutputPart, ToolDefinition, Tools, joined_parts
from specdec.structured.output_parser import OutputParser
from specdec.structured.tool_formats import tool_formats
from specdec.structured.tool_formats.probe import PROBED_TOOLS, layout_in, probed_messages, single_call
from tests.support.tool_models import FAMILIES

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer"},
        "is_daily": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "limit": {"type": "number"}},
    "required": ["text"],
    "additionalProperties": False,
}
TOOLS = Tools(
    (
        ToolDefinition("get_weather", "Forecast of a city", json.dumps(WEATHER)),
        ToolDefinition("note", "", json.dumps(NOTE)),
        ToolDefinition("now"),
    )
)
SCHEMAS = {"get_weather": WEATHER, "note": NOTE, "now": {"type": "object", "properties": {}}}

#: Texts for strings. Words in brackets stand for texts that look like markers, which `_revealed` puts there.
_TEXTS = (
    "Paris", "São Paulo", "東京 🗼", 'say "hi"', "back\\slash\\", "two\nlines", "{", "}}", "a, b: c", "[0]", "[1]",
    "[2] and [3]", "[4]", "x\n[5]\ny", "tab\there", "", " ", "'", "[6]", "True", "null", "-1.5e3", "\\u00e9", "[7]",
)  # fmt: skip
_LOOKALIKES = (
    "<tool_call>", "</tool_call>", "</function>", "<parameter=city>", "<think>", "</parameter>", "<|tool_call>",
    "[TOOL_CALLS]",
)  # fmt: skip
_ANSWERS = (
    "",
    "I will look.",
    "One moment",
    "a < b, [0] is a tag",
    "Line one\nLine two",
    "See [1] and <tool",
    "[",
    'As {"name": "x"}',
)
_ID = "aaaaaaaaa"


@dataclass(frozen=True)
class Recorded:
    """One output: its pieces, and the message that it means."""

    pieces: tuple[tuple[str, bool], ...]
    """Texts, and markers with True."""
    answer: str
    calls: tuple[tuple[str, Any], ...]
    """Names with their arguments."""
    markers: tuple[str, ...]
    """Markers that are single tokens."""


def form_of(family: str) -> OutputForm:
    """Return the form of outputs that may call `TOOLS`."""
    format_ = tool_formats()[format_name(family)]
    names = {tool.name: format_.arguments.text_parameters(tool.parameters) for tool in TOOLS.definitions}
    return OutputForm(format_.name, layout_of(family), text_parameters=names)


def format_name(family: str) -> str:
    return family


@cache
def layout_of(family: str) -> Layout:
    """Return the layout that the family's template shows."""
    messages = probed_messages()
    format_ = tool_formats()[format_name(family)]
    rendered = render(family, single_call(messages) if format_.has_one_call else messages, PROBED_TOOLS)
    layout = layout_in(rendered, format_)
    assert layout is not None
    return layout


@cache
def _compiled(template: str) -> Any:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(template)


def render(family: str, messages: Sequence[Any], tools: Tools, *, opens_turn: bool = False) -> str:
    """Return a conversation as the family's template writes it."""
    shown = [tool.for_template() for tool in tools.definitions]
    template = _compiled(FAMILIES[family][0])
    text: str = template.render(messages=messages, tools=shown, add_generation_prompt=opens_turn)
    return text


def recorded(family: str, seed: int, markers: Sequence[str] | None = None) -> Recorded:
    """Return an output, drawn by a seed.

    Args:
        family: the family.
        seed: of the message.
        markers: markers that are single tokens; None: the family's.
    """
    draw = random.Random(f"{family} {seed}")
    format_ = tool_formats()[format_name(family)]
    num_calls = draw.choice((0, 1, 1, 1, 2, 3)) if not format_.has_one_call else draw.choice((0, 1, 1))
    can_have_both = family not in ("llama3_json", "mistral")
    answer = draw.choice(_ANSWERS) if can_have_both or not num_calls else ""
    calls = [_call(draw, family) for _ in range(num_calls)]
    text = _written(family, answer, calls)
    used = FAMILIES[family][1] if markers is None else markers
    pieces = re.split(f"({'|'.join(map(re.escape, used))})", text) if used else [text]
    return Recorded(
        tuple((piece if piece in used else _revealed(piece), piece in used) for piece in pieces if piece),
        _revealed(answer),
        tuple((name, json.loads(_revealed(json.dumps(arguments)))) for name, arguments in calls),
        tuple(used),
    )


def read(recorded_output: Recorded, family: str, cuts: Sequence[int] | None = None) -> tuple[OutputParser, list[Any]]:
    """Return a parser that has read an output, and its parts.

    Args:
        recorded_output: the output.
        family: its family.
        cuts: places at which the text is cut, counted in symbols; None: nowhere but at markers.
    """
    parser = OutputParser(form_of(family), recorded_output.markers, lambda index: f"id{index}")
    parts: list[OutputPart] = []
    position = 0
    for piece, is_marker in recorded_output.pieces:
        if is_marker:
            parts += parser.feed_marker(piece)
            position += 1
            continue
        inner = [cut - position for cut in cuts or () if 0 < cut - position < len(piece)]
        for start, end in zip([0, *inner], [*inner, len(piece)], strict=True):
            parts += parser.feed_text(piece[start:end])
        position += len(piece)
    return parser, [*parts, *parser.finish()]


def parts_read(recorded_output: Recorded, family: str, cuts: Sequence[int] | None = None) -> list[OutputPart]:
    """Return the parts of an output, neighbours joined; arguments as `read`."""
    return joined_parts(read(recorded_output, family, cuts)[1])


def num_symbols(recorded_output: Recorded) -> int:
    return sum(1 if is_marker else len(piece) for piece, is_marker in recorded_output.pieces)


def plain_tokens(tokenizer: Any, text: str, markers: Sequence[str]) -> list[int]:
    """Return the tokens of a text that spell its markers by ordinary tokens."""
    pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text) if markers else [text]
    parts = [part for piece in pieces for part in ((piece[:1], piece[1:]) if piece in markers else (piece,)) if part]
    return [token_id for part in parts for token_id in tokenizer.encode(part, add_special_tokens=False)]


def tokens_of(recorded_output: Recorded, tokenizer: Any, markers: Sequence[str]) -> list[int]:
    """Return the tokens of an output."""
    token_ids: list[int] = []
    for piece, is_marker in recorded_output.pieces:
        if is_marker:
            token_ids.append(tokenizer.convert_tokens_to_ids(piece))
        else:
            token_ids += plain_tokens(tokenizer, piece, markers)
    return token_ids


def _written(family: str, answer: str, calls: Sequence[tuple[str, Any]]) -> str:
    """Return the output whose message is the answer and the calls."""
    user = {"role": "user", "content": "Q"}
    tool_calls = [
        {"id": _ID, "type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
    ]
    message = {"role": "assistant", "content": answer} | ({"tool_calls": tool_calls} if calls else {})
    prompt = render(family, [user], TOOLS, opens_turn=True)
    whole = render(family, [user, message], TOOLS)
    if not answer and not calls:
        return ""
    assert whole.startswith(prompt)
    output = whole[len(prompt) :].removesuffix("<|eos|>")
    return output.replace(f', "id": "{_ID}"', "")  # the models write no ids


def _call(draw: random.Random, family: str) -> tuple[str, Any]:
    # Text between tags cannot hold the tag that ends it.
    texts = [text for text in _TEXTS if family != "qwen_xml" or "\n[5]\n" not in text]
    name = draw.choice(("get_weather", "note", "now"))
    if name == "now":
        return name, {}
    if name == "note":
        number = {"limit": draw.choice((0.5, -3, 1e3))} if draw.random() < 0.5 else {}
        return name, _ordered({"text": draw.choice(texts)} | number, family)
    arguments: dict[str, Any] = {"city": draw.choice(texts)}
    options = {
        "unit": draw.choice("CF"),
        "days": draw.randint(-3, 30),
        "is_daily": draw.random() < 0.5,
        "places": [draw.choice(texts) for _ in range(draw.randint(0, 2))],
    }
    return name, _ordered(arguments | {key: options[key] for key in options if draw.random() < 0.5}, family)


def _ordered(arguments: dict[str, Any], family: str) -> dict[str, Any]:
    return dict(sorted(arguments.items())) if layout_of(family).sorts_keys else arguments


def _revealed(text: str) -> str:
    for index, lookalike in enumerate(_LOOKALIKES):
        text = text.replace(f"[{index}]", lookalike)
    return text
