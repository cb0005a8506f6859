"""The generated pages, tables of figures and the picture are what the code and the kept measurements give."""

from __future__ import annotations

import json
import re

import pytest

from specdec.cli.service_settings import SETTINGS_TYPES
from specdec.settings.reading import flag_of
from tools.reference import configuration, errors, figures, http_api, http_examples, http_text
from tools.reference.__main__ import COMMAND, PAGES, PAGES_WITH_FIGURES, committed, expected
from tools.reference.error_advice import ADVICE
from tools.reference.proto_comments import read_comments
from tools.reference.speed_chart import chart

#: Schemas of answers and of the framework.
ANSWERS = {
    "ErrorAnswer",
    "ErrorDetail",
    "AnthropicErrorAnswer",
    "AnthropicErrorDetail",
    "HTTPValidationError",
    "ValidationError",
}


@pytest.mark.parametrize("name", [*PAGES, *PAGES_WITH_FIGURES])
def test_a_committed_page_is_the_generated_one(name: str) -> None:
    assert committed(name) == expected(name), f"{name} differs from the code: run {COMMAND}"


def test_a_number_that_no_command_printed_would_be_noticed() -> None:
    page = committed("README.md")
    shown = figures.table("latency").split("**")[1]
    assert figures.fill(page.replace(f"**{shown}**", "**9.99**", 1)) == page


@pytest.mark.parametrize("name", PAGES_WITH_FIGURES)
def test_every_ratio_of_a_page_stands_in_a_table_of_figures(name: str) -> None:
    outside = figures.PLACE.sub("", committed(name))
    assert "**" not in "".join(line for line in outside.splitlines() if line.startswith("|"))


def test_the_table_of_other_engines_shows_every_ratio_of_the_kept_runs() -> None:
    kept = [
        f"**{each['value']:.2f}** ({each['low']:.2f} to {each['high']:.2f}) |"
        for suite in ("peers", "peers_qwen")
        for each in json.loads((figures.RESULTS / f"{suite}.json").read_text())
        if each["metric"] == "tokens_per_s_ratio"
    ]
    shown = [line.rpartition("| **")[2] for line in figures.table("peers").splitlines() if "| **" in line]
    assert shown == [ratio.removeprefix("**") for ratio in kept]


def test_the_picture_shows_the_kept_rates() -> None:
    assert f">{figures.rate('specdec'):.0f}</text>" in chart()


@pytest.mark.parametrize("service", SETTINGS_TYPES)
def test_every_setting_of_a_service_is_on_the_configuration_page(service: str) -> None:
    described = re.findall(r"^- `(--[a-z-]+)` \(", configuration.page(), flags=re.MULTILINE)
    assert {flag_of(name) for name in SETTINGS_TYPES[service].model_fields} <= set(described)


def test_every_reason_has_advice_and_no_advice_is_left_over() -> None:
    assert set(errors.reasons()) == set(ADVICE)


def test_the_comment_beside_a_field_and_the_one_above_a_method_are_read() -> None:
    comments = read_comments("specdec/v1/coordinator.proto")
    assert comments["GenerateRequest.prompt"] == (
        "text, appended as it is to what the session holds; the output's text continues it"
    )
    assert comments["CoordinatorService.GetSession"].startswith("Reads a session's record.")
    assert comments["GenerateRequest.expected_session_tokens"].startswith("Tokens the caller believes")


def test_every_field_of_a_request_is_on_the_http_page() -> None:
    page, api = committed("docs/reference/http-api.md"), http_api.api_document()
    schemas = api["components"]["schemas"]
    names = {name for schema in schemas.values() for name in schema["properties"] if schema["title"] not in ANSWERS}
    assert {"temperature", "tools", "stop_sequences", "add_special_tokens"} <= names
    assert [name for name in sorted(names) if not re.search(rf"`{name}[`.]", page)] == []


def test_every_route_is_on_the_http_page() -> None:
    page = committed("docs/reference/http-api.md")
    assert [path for path in http_api.api_document()["paths"] if f"{path}`" not in page] == []


def test_every_meaning_is_that_of_a_field_of_an_answer() -> None:
    answer = http_examples.chat_answer()
    given = {
        "metrics": answer["metrics"]["speculative_decoding"],
        "statistics": answer["metrics"]["specdec"],
        "token": answer["choices"][0]["specdec"]["tokens"][0],
        "round": http_examples.chat_chunk()["specdec"]["round"],
        "session": http_examples.session_answer(),
    }
    assert {name: set(texts) for name, texts in http_text.MEANINGS.items()} == {
        name: set(example) for name, example in given.items()
    }


@pytest.mark.parametrize(
    "line",
    [
        "- `temperature` (number, at least 0): Sampling temperature (0: greedy).",
        '- `tools`, `tool_choice` (only `"none"` is accepted): The chat template tells the model of tools; use',
        "| 409 | `invalid_request_error` |",
        "- `response.output_text.delta`:",
    ],
)
def test_the_http_page_tells_ranges_refusals_errors_and_events(line: str) -> None:
    assert line in committed("docs/reference/http-api.md")
