"""Forms of outputs: which formats a checkpoint's template shows, and which requests are refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.requests import ChatTurn, GenerationRequest, SpeculationChoice
from coordinator.text.output_forms import NONE, OutputForms, ParserNames
from coordinator.text.output_parts import call_id
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.constraint import Constraint, ConstraintKind
from specdec.contract.errors import InvalidRequest
from specdec.contract.output_form import Layout, OutputForm, ReasoningFormat
from specdec.contract.tools import ToolChoice, ToolDefinition, Tools
from specdec.contract.types import Mode, SamplingFilters, SamplingParams
from specdec.structured.matcher import Matcher
from tests.support.recorded_outputs import TOOLS
from tests.support.tool_models import FAMILIES, HERMES, HERMES_THINKING, THINK_MARKERS, write_family

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def served(directory: Path, template: str, markers: Sequence[str] = (), **declared: Any) -> ServedTokenizer:
    write_family(directory, "target", template, markers)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | declared))
    return ServedTokenizer(str(directory))


def request(tools: Tools | None = TOOLS, answer: Constraint | None = None, arguments: str = "") -> GenerationRequest:
    return GenerationRequest(
        session_id="",
        request_id="",
        sampling=SamplingParams(max_new_tokens=8, filters=SamplingFilters(), seed=0, constraint=answer),
        is_seeded=False,
        speculation=SpeculationChoice(Mode.OFF, None, ""),
        messages=(ChatTurn("user", "Q"),),
        template_arguments_json=arguments,
        tools=tools,
    )


def with_form(forms: OutputForms, asked: GenerationRequest) -> GenerationRequest:
    return forms.with_form(asked, given_up=threading.Event())


def form_of(forms: OutputForms, asked: GenerationRequest) -> OutputForm:
    form = with_form(forms, asked).output_form
    assert form is not None
    return form


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("hermes", Layout(before="\n", between="\n")),
        ("qwen_xml", Layout(before="\n\n", between="\n", true="True", false="False", null="None")),
        ("llama3_json", Layout()),
        ("mistral", Layout(between=", ")),
        ("mistral_named", Layout()),
        ("gemma4", Layout(sorts_keys=True)),
    ],
)
def test_the_template_shows_the_format_and_its_layout(family: str, layout: Layout, tmp_path: Path) -> None:
    form = form_of(OutputForms(served(tmp_path, *FAMILIES[family]), ParserNames()), request())
    assert form.tool_format_name == family
    assert form.layout == layout
    assert form.reasoning is None
    assert form.text_parameters == (
        {"get_weather": ("city", "unit"), "note": ("text",), "now": ()} if family == "qwen_xml" else None
    )


def test_compact_separators_and_other_gaps_are_read_from_the_template(tmp_path: Path) -> None:
    compact = HERMES.replace("arguments | tojson }}", "arguments | tojson(separators=(',', ':')) }}")
    compact = compact.replace("'\\n<tool_call>", "'\\n\\n<tool_call>")
    form = form_of(OutputForms(served(tmp_path, compact), ParserNames()), request())
    assert form.layout == Layout(before="\n\n", between="\n\n", item_separator=",", key_separator=":")


def test_tools_are_refused_for_a_model_without_a_format(tmp_path: Path) -> None:
    tokenizer = served(tmp_path, PLAIN)
    for names in (ParserNames(), ParserNames(tools=NONE)):
        with pytest.raises(InvalidRequest, match="no known format of tool calls") as error:
            with_form(OutputForms(tokenizer, names), request())
        assert error.value.field == "tools"


def test_a_setting_names_the_format_of_a_model_whose_template_shows_none(tmp_path: Path) -> None:
    form = form_of(OutputForms(served(tmp_path, PLAIN), ParserNames(tools="hermes")), request())
    assert (form.tool_format_name, form.layout) == ("hermes", Layout(before="\n", between="\n"))
    with pytest.raises(InvalidRequest, match="tool_parser must be one of auto, none, "):
        ParserNames(tools="hermit").check()


@pytest.mark.parametrize(("content", "name"), [("json", "hermes"), ("xml-inline", "qwen_xml")])
def test_the_checkpoint_can_declare_its_formats(content: str, name: str, tmp_path: Path) -> None:
    declared = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"open": "<r>", "close": "</r>"},
            "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": content, "repeats": True},
            "content": {},
        },
    }
    forms = OutputForms(served(tmp_path, PLAIN, response_template=declared), ParserNames())
    form = form_of(forms, request())
    assert form.tool_format_name == name
    assert form.reasoning == ReasoningFormat("declared", "<r>", "</r>")


@pytest.mark.parametrize(
    ("arguments", "is_begun"), [("", False), ('{"begun": true}', True), ('{"enable_thinking": false}', None)]
)
def test_the_end_of_the_prompt_tells_whether_reasoning_has_begun(
    arguments: str, is_begun: bool | None, tmp_path: Path
) -> None:
    forms = OutputForms(served(tmp_path, HERMES_THINKING, THINK_MARKERS), ParserNames())
    for tools in (None, TOOLS):
        form = with_form(forms, request(tools, arguments=arguments)).output_form
        if is_begun is None:  # the prompt has the end of the reasoning, too
            assert form is None or form.reasoning is None
        else:
            assert form is not None
            assert form.reasoning is not None
            assert form.begins_in_reasoning is is_begun


def test_reasoning_alone_needs_no_constraint_and_an_answer_with_one_gets_one_for_all(tmp_path: Path) -> None:
    forms = OutputForms(served(tmp_path, HERMES_THINKING, THINK_MARKERS), ParserNames())
    assert with_form(forms, request(None)).sampling.constraint is None
    constraint = with_form(forms, request(None, Constraint.json_object())).sampling.constraint
    assert constraint is not None
    assert constraint.kind is ConstraintKind.STRUCTURAL


def test_no_form_is_made_without_tools_and_reasoning(tmp_path: Path) -> None:
    forms = OutputForms(served(tmp_path, PLAIN), ParserNames())
    assert not forms.has_form(request(None))
    thinking = served(tmp_path / "b", HERMES_THINKING, THINK_MARKERS)
    assert OutputForms(thinking, ParserNames()).has_form(request(None))
    assert not OutputForms(thinking, ParserNames(reasoning=NONE)).has_form(request(None))
    assert not OutputForms(thinking, ParserNames()).has_form(replace(request(None), messages=None))


def test_the_choice_none_leaves_an_answer_and_no_calls_to_read(tmp_path: Path) -> None:
    forms = OutputForms(served(tmp_path, *FAMILIES["hermes"]), ParserNames())
    formed = with_form(forms, request(replace(TOOLS, choice=ToolChoice.NONE)))
    assert formed.output_form is None
    assert formed.sampling.constraint is not None


def test_a_strict_tool_that_the_format_cannot_enforce_is_refused_by_name(tmp_path: Path) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "string", "pattern": "^x"}}})
    tools = Tools((ToolDefinition("f"), ToolDefinition("g", "", schema, is_strict=True)))
    forms = OutputForms(served(tmp_path, *FAMILIES["qwen_xml"]), ParserNames())
    with pytest.raises(InvalidRequest, match="pattern") as error:
        with_form(forms, request(tools))
    assert error.value.field == "tools.definitions[1].parameters_json"
    assert error.value.reason == "CONSTRAINT_INVALID"


HOSTILE = [
    {"a": 3},
    {"a": {"type": 3}},
    {"a": {"type": ["string", 3]}},
    {"a": {"anyOf": 3}},
    {"a": {"anyOf": [3, None]}},
    {"a": {"enum": {}}},
    {"a": {"enum": []}},
    {"a": {"type": "array", "items": 3, "minItems": "x"}},
    {"a": {"type": "array", "minItems": -1, "maxItems": -5}},
    {"a": {"$ref": "#/properties/a"}},
    {"a": {"$ref": 3}},
    {"a": {"$ref": "#/a/b/c"}},
    {"a": {"type": "object", "properties": {"b": {"type": "object", "properties": []}}}},
    {"a\nb": {"type": "string"}, "c>\n": {}, "": {"type": "string"}},
    {"a": {"type": "integer", "minimum": "x"}},
    {"a": {"type": "integer", "minimum": 5, "maximum": 1}},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_schema_is_refused_by_name_or_compiles(family: str, tmp_path: Path) -> None:
    tokenizer = served(tmp_path, *FAMILIES[family])
    forms = OutputForms(tokenizer, ParserNames())
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"anyOf": [deep, {"type": "object", "properties": {"x": {"type": "null"}}}]}
    refused: list[tuple[dict[str, Any], InvalidRequest]] = []
    for properties in [*HOSTILE, {"a": deep}]:
        for is_strict in (False, True):
            schema = json.dumps({"type": "object", "properties": properties, "required": list(properties)})
            tools = Tools((ToolDefinition("f"), ToolDefinition("g", "", schema, is_strict)), ToolChoice.REQUIRED)
            try:
                constraint = with_form(forms, request(tools)).sampling.constraint
                assert constraint is not None
                Matcher(tokenizer.token_table((2,)), constraint).mask([2])
            except InvalidRequest as error:
                refused.append((properties, error))
    for properties, error in refused:
        assert error.reason in ("CONSTRAINT_INVALID", "NO_LEGAL_TOKEN"), properties
        assert error.field in ("tools", "tools.definitions[1].parameters_json")
    for properties in ({"a": 3}, {"a": {"$ref": 3}}, {"a": {"$ref": "#/a/b/c"}}):
        assert sum(each == properties for each, _ in refused) == 2, properties


def test_the_id_of_a_call_depends_on_its_place_alone() -> None:
    ids = {call_id(session, turn, index) for session in "ab" for turn in range(3) for index in range(3)}
    assert len(ids) == 18
    assert call_id("a", 1, 2) == call_id("a", 1, 2)
    assert call_id("a", 1, 2).startswith("call_")
    assert len(call_id("a", 1, 2, num_characters=9)) == 9
    assert call_id("a", 1, 2, num_characters=9).isalnum()
