"""The generated pages, tables of figures and the picture are what the code and the kept measurements give."""

from __future__ import annotations

import json

import pytest

from tests.support.reference import errors, figures
from tests.support.reference.__main__ import COMMAND, PAGES_WITH_FIGURES, committed, expected
from tests.support.reference.error_advice import ADVICE
from tests.support.reference.proto_comments import read_comments
from tests.support.reference.speed_chart import chart


@pytest.mark.parametrize(("name", "text"), [*expected()], ids=lambda value: value if len(value) < 60 else "")
def test_a_committed_page_is_the_generated_one(name: str, text: str) -> None:
    assert committed(name) == text, f"{name} differs from the code: run {COMMAND}"


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


def test_every_reason_has_advice_and_no_advice_is_left_over() -> None:
    assert set(errors.reasons()) == set(ADVICE)


def test_the_comment_beside_a_field_and_the_one_above_a_method_are_read() -> None:
    comments = read_comments("specdec/v1/coordinator.proto")
    assert comments["GenerateRequest.prompt"] == "text, appended to what the session holds"
    assert comments["CoordinatorService.GetSession"].startswith("Reads a session's record.")
    assert comments["GenerateRequest.expected_session_tokens"].startswith("Tokens the caller believes")
