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


def test_the_table_of_other_engines_shows_every_ratio_of_a_kept_run(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path_factory.mktemp("results")
    record = {
        "suite": "peers", "case": "1 stream", "system": "specdec", "metric": "tokens_per_s_ratio", "value": 0.5,
        "ratio_to": "vllm", "low": 0.4, "high": 0.6, "hardware": "2 cores", "date": "2026-11-24T00:00:00Z",
    }  # fmt: skip
    (results / "peers.json").write_text(json.dumps([record]))
    monkeypatch.setattr(figures, "RESULTS", results)
    figures.records.cache_clear()
    try:
        assert "| 1 stream | specdec | vllm | **0.50** (0.40 to 0.60) |" in figures.table("peers")
    finally:
        figures.records.cache_clear()


def test_the_picture_shows_the_kept_rates() -> None:
    assert f">{figures.rate('specdec'):.0f}</text>" in chart()


def test_every_reason_has_advice_and_no_advice_is_left_over() -> None:
    assert set(errors.reasons()) == set(ADVICE)


def test_the_comment_beside_a_field_and_the_one_above_a_method_are_read() -> None:
    comments = read_comments("specdec/v1/coordinator.proto")
    assert comments["GenerateRequest.prompt"] == "text, appended to what the session holds"
    assert comments["CoordinatorService.GetSession"].startswith("Reads a session's record.")
    assert comments["GenerateRequest.expected_session_tokens"].startswith("Tokens the caller believes")
