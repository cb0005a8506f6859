"""Turns that are rendered again: the message read from an output has the output's tokens in the next prompt."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.requests import GenerationIdentity, RequestParameters, SpeculationChoice
from coordinator.text.kept_tokens import common_text
from coordinator.text.output import OutputStep, OutputWriter
from coordinator.text.output_forms import OutputForms, ParserNames
from coordinator.text.output_parts import parts_of
from coordinator.text.tokenizer import ServedTokenizer
from specdec.client.tools import calls_of, reasoning_of
from specdec.contract.output_form import OutputForm
from specdec.contract.tools import AnswerText
from specdec.contract.types import FinishReason, Mode, SamplingFilters, SamplingParams
from tests.support.recorded_outputs import TOOLS, Recorded, recorded, tokens_of
from tests.support.tool_models import FAMILIES, HERMES_THINKING, THINK_MARKERS, write_family
from tests.unit.coordinator.test_output_forms import request

EOS = 2
NUM_OUTPUTS = 120
USER = {"role": "user", "content": "Q"}
#: Texts in strings that look like markers become markers in a prompt, whatever tokens spelled them.
LOOKALIKES = ("<tool_call>", "</tool_call>", "<|tool_call>", "[TOOL_CALLS]")


class Family:
    """A family's tokenizer, and the form of its outputs."""

    def __init__(self, template: str, markers: Sequence[str], directory: Path, arguments: str = "") -> None:
        self.markers = markers
        write_family(directory, "target", template, markers)
        self.tokenizer = ServedTokenizer(str(directory))
        asked = request(TOOLS, arguments=arguments)
        formed = OutputForms(self.tokenizer, ParserNames()).with_form(asked, given_up=threading.Event())
        assert formed.output_form is not None
        self.form: OutputForm = formed.output_form

    def writer(self, max_new_tokens: int = 1000, **sampling: Any) -> OutputWriter:
        params = SamplingParams(max_new_tokens=max_new_tokens, filters=SamplingFilters(), seed=0, **sampling)
        parameters = RequestParameters(params, SpeculationChoice(Mode.OFF, None, ""), "", output_form=self.form)
        identity = GenerationIdentity("s", "r", "", 0, 0, parameters)
        return OutputWriter(self.tokenizer, params, (EOS,), parts=parts_of(identity, self.tokenizer))

    def tokens(self, output: Recorded) -> list[int]:
        return [*tokens_of(output, self.tokenizer._tokenizer, self.markers), EOS]

    def prompt(self, *messages: dict[str, Any], arguments: str = "") -> list[int]:
        return self.tokenizer.encode_chat(messages, tools=TOOLS, template_arguments_json=arguments)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(*FAMILIES[request.param], tmp_path_factory.mktemp(request.param))


def message_of(step: OutputStep) -> dict[str, Any]:
    parts = [part for parts in step.parts for part in parts]
    calls = [call.for_message() for call in calls_of(parts)]
    answer = "".join(part.text for part in parts if isinstance(part, AnswerText))
    message = {"role": "assistant", "content": answer or None} | ({"tool_calls": calls} if calls else {})
    reasoning = reasoning_of(parts)
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def test_a_message_read_from_an_output_has_its_tokens_in_the_next_prompt(family: Family) -> None:
    begin = family.prompt(USER)
    num_equal = num_compared = 0
    for seed in range(NUM_OUTPUTS):
        output = recorded(family.form.tool_format_name, seed)
        spelled = "".join(piece for piece, is_marker in output.pieces if not is_marker)
        if not output.pieces or any(lookalike in spelled for lookalike in LOOKALIKES):
            continue
        token_ids = family.tokens(output)
        step = family.writer().write(token_ids)
        rendered = family.prompt(USER, message_of(step), USER)
        if family.form.tool_format_name == "mistral" and output.calls:
            # Its template writes ids, which no model writes, after the arguments of each call.
            end = len(begin) + len(token_ids) - 4
            token_ids = token_ids[:-4] if len(output.calls) == 1 else []
            num_compared += len(output.calls) == 1
            num_equal += len(output.calls) == 1 and rendered[len(begin) : end] == token_ids
            continue
        num_compared += 1
        num_equal += rendered[: len(begin) + len(token_ids)] == [*begin, *token_ids]
    assert num_compared >= NUM_OUTPUTS / 4
    assert num_equal / num_compared >= 0.95, (num_equal, num_compared)


@pytest.mark.parametrize("arguments", ["", '{"begun": true}'])
@pytest.mark.parametrize("markers", [(), THINK_MARKERS, ("<tool_call>", "</tool_call>", *THINK_MARKERS)])
def test_a_message_with_reasoning_has_its_tokens_in_the_next_prompt(
    markers: tuple[str, ...], arguments: str, tmp_path: Path
) -> None:
    family = Family(HERMES_THINKING, markers, tmp_path, arguments)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    begin = family.prompt(USER, arguments=arguments)
    for reasoning in ("Hm, a < b.", "Two\n\nlines", "I may <tool_"):
        for answer in ("Yes.", f"Look:\n{call}", call, f"{call}\n{call}"):
            opener = "" if arguments else "<think>\n"
            text = f"{opener}{reasoning}\n</think>\n\n{answer}"
            token_ids = [*family.tokenizer.encode(text, add_special_tokens=False), EOS]
            step = family.writer().write(token_ids)
            check_reasoning_counts(family, token_ids, opener.strip())
            message = message_of(step)
            assert message["reasoning_content"] == reasoning
            rendered = family.prompt(USER, message, USER)
            held = np.array([*begin, *step.token_ids], np.uint32)
            kept, used = common_text(held, np.array(rendered, np.uint32), family.tokenizer)
            assert kept == len(held), (text, message)
            assert used < len(rendered)


def check_reasoning_counts(family: Family, token_ids: list[int], opener: str) -> None:
    """Compare the counts of every beginning of an output with the marks in its decoded text."""
    texts = [family.tokenizer._tokenizer.decode(token_ids[:count]) for count in range(len(token_ids) + 1)]
    begin, end = (next(count for count, text in enumerate(texts) if mark in text) for mark in (opener, "</think>"))
    writer = family.writer()
    for count, token_id in enumerate(token_ids, 1):
        writer.write([token_id])
        assert writer.num_reasoning_tokens == (0 if count < begin else min(count, end))


def test_an_output_with_whole_calls_ends_for_them(family: Family) -> None:
    for seed in range(30):
        output = recorded(family.form.tool_format_name, seed)
        writer = family.writer()
        step = writer.write(family.tokens(output))
        assert step.finish_reason is (FinishReason.TOOL_CALLS if output.calls else FinishReason.STOP)
        assert len(step.parts) == len(step.texts) == len(step.token_ids)
        assert writer.num_reasoning_tokens == 0
        answer = "".join(part.text for parts in step.parts for part in parts if isinstance(part, AnswerText))
        assert "".join(step.texts) == answer == output.answer


def test_parts_come_token_by_token_however_the_rounds_are_cut(family: Family) -> None:
    for seed in range(20):
        token_ids = family.tokens(recorded(family.form.tool_format_name, seed))
        whole = family.writer().write(token_ids)
        for size in (1, 3):
            writer = family.writer()
            steps = [writer.write(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
            assert tuple(part for step in steps for part in step.parts) == whole.parts
            assert steps[-1].finish_reason is whole.finish_reason


def test_a_stop_string_ends_an_output_also_in_a_call(family: Family) -> None:
    seeds = (seed for seed in range(100) if "Paris" in str(recorded(family.form.tool_format_name, seed).calls))
    output = recorded(family.form.tool_format_name, next(seeds))
    step = family.writer(stop=("ari",)).write(family.tokens(output))
    assert step.finish_reason is FinishReason.STOP_STRING
    calls = calls_of([part for parts in step.parts for part in parts])
    assert calls[-1].arguments.endswith('"P')
    assert "ari" not in str(calls)


def test_an_output_that_the_limit_cuts_ends_for_its_length_with_the_parts_so_far(family: Family) -> None:
    token_ids = family.tokens(recorded(family.form.tool_format_name, 3))
    whole = family.writer().write(token_ids)
    for limit in range(1, len(token_ids)):
        step = family.writer(limit).write(token_ids)
        assert step.finish_reason is FinishReason.LENGTH
        assert step.parts[: limit - 1] == whole.parts[: limit - 1]
