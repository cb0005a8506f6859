"""The closing line of an answer, alone and as `specdec generate` prints it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.cli.__main__ import run
from specdec.cli.closing_line import closing_line, tokens_per_s
from specdec.client import Completion, GenerationStats, TokenDetail, Usage
from specdec.contract.types import TokenSource
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import finished, pool, started, tokens
from tests.unit.cli.conftest import Serve, answer


def completion(sources: str, num_steps: int, e2el_s: float = 0.5, finish_reason: str = "stop") -> Completion:
    """Return an output with one token per letter: accepted, corrected, bonus or target-only."""
    details = tuple(TokenDetail(TokenSource("acbt".index(letter) + 1), 1, 1, "", None, (), "x") for letter in sources)
    stats = GenerationStats(num_steps, 0, 0, (), 0, 0.0, e2el_s, 0.0, 0.0, 0)
    token_ids = tuple(range(len(sources)))
    return Completion("s", "r", "x", token_ids, finish_reason, Usage(1, len(sources), 0), stats, details)


def test_the_line_has_tokens_seconds_accepted_share_and_tokens_per_step() -> None:
    assert (
        closing_line(completion("aacaab", 2)) == "6 tokens in 0.50 s · draft right 80 % of the time · 3.0 tokens a step"
    )


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        (["default", "default"], "draft right 50 %"),
        (["eagle3", "eagle3"], "eagle3 right 50 %"),
        (["eagle3", "default"], "default and eagle3 right 50 %"),
    ],
)
def test_the_line_names_the_pools_that_drafted(pools: list[str], words: str) -> None:
    drafted = completion("ac", 1)
    details = tuple(replace(detail, draft_pool=pool) for detail, pool in zip(drafted.details, pools, strict=True))
    assert closing_line(replace(drafted, details=details)).startswith(f"2 tokens in 0.50 s · {words} of the time")


def test_the_verbose_line_adds_the_figures_under_their_usual_names() -> None:
    line = closing_line(completion("aacaab", 2), verbose=True)
    assert line.startswith(closing_line(completion("aacaab", 2)))
    assert line.endswith(" · steps 2, alpha 0.80, tau 3.00, 12.0 tokens/s")


def test_the_line_of_an_output_without_drafts_has_no_acceptance() -> None:
    assert closing_line(completion("tt", 2)) == "2 tokens in 0.50 s"
    assert closing_line(completion("tt", 2), verbose=True) == (
        "2 tokens in 0.50 s · steps 2, alpha n/a, tau 1.00, 4.0 tokens/s"
    )


def test_the_line_of_an_empty_output_has_no_speed() -> None:
    empty = completion("", 0, e2el_s=0.0)
    assert tokens_per_s(empty) == 0.0
    assert closing_line(empty) == "0 tokens in 0.00 s"


def test_the_line_of_a_stopped_output_counts_the_tokens_received() -> None:
    stopped = completion("ac", 0, e2el_s=0.0, finish_reason="cancelled")
    assert closing_line(stopped) == "stopped after 2 tokens · draft right 50 % of the time"


def test_one_token_and_a_long_time_are_written_as_such() -> None:
    assert closing_line(completion("t", 1, e2el_s=12.34)) == "1 token in 12.3 s"


def test_generate_prints_the_line_on_stderr(coordinator: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    _, environ = coordinator(answer)
    assert run(["generate", "hi"], environ) == 0
    assert capsys.readouterr().err == "2 tokens in 0.50 s · draft right 50 % of the time · 1.0 tokens a step\n"
    assert run(["generate", "hi", "--verbose"], environ) == 0
    assert capsys.readouterr().err.endswith(" · steps 2, alpha 0.50, tau 1.00, 4.0 tokens/s\n")


PAUSED = " · drafting paused: it gives no speedup here"
NO_DRAFT = " · no draft"


@pytest.mark.parametrize(
    ("flags", "pools", "reason"),
    [
        ([], [pool("draft", alpha=0.02, gamma=0.1), pool("target")], PAUSED),
        ([], [pool("draft", alpha=0.5, gamma=3.0), pool("target")], NO_DRAFT),
        ([], [pool("draft"), pool("target")], NO_DRAFT),
        ([], [pool("target")], " · no drafts: the system has no draft pool"),
        ([], [pool("draft", 0, alpha=0.02, gamma=0.0)], PAUSED),
        (["--mode", "off"], [pool("draft", alpha=0.02, gamma=0.0)], " · no drafts, as requested"),
        (["--gamma", "0"], [pool("draft", alpha=0.02, gamma=0.0)], " · no drafts, as requested"),
    ],
)
def test_the_line_of_an_output_without_drafts_gives_the_reason(
    flags: list[str], pools: list[pb.PoolInfo], reason: str, coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(lambda r: [started(r), tokens(0, [1, 2], "tt"), finished(2)])
    servicer.served = pb.GetInfoResponse(pools=pools)
    assert run(["generate", "hi", *flags], environ) == 0
    assert capsys.readouterr().err == f"2 tokens in 0.50 s{reason}\n"


@pytest.mark.parametrize(
    ("num_without", "gamma", "reason"),
    [
        (7, 0.1, " · drafting paused in 7 of 8 steps: it gives no speedup here"),
        (7, 2.0, " · no draft in 7 of 8 steps"),
        (3, 0.1, ""),
    ],
)
def test_the_line_counts_the_steps_without_a_draft_and_shows_one_acceptance_only(
    num_without: int, gamma: float, reason: str, coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer_mostly_without_drafts(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        end = finished(8)
        end.finished.stats.num_rounds = 8
        end.finished.stats.num_target_only_steps = num_without
        return [started(request), tokens(0, list(range(8)), "cttttttt"), end]

    servicer, environ = coordinator(answer_mostly_without_drafts)
    servicer.served = pb.GetInfoResponse(pools=[pool("draft", alpha=0.02, gamma=gamma), pool("target")])
    assert run(["generate", "hi"], environ) == 0
    line = capsys.readouterr().err
    assert line == f"8 tokens in 0.50 s · draft right 0 % of the time · 1.0 tokens a step{reason}\n"
    assert line.count("%") == 1
    assert "alpha" not in line
