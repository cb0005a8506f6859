"""Ranks that record steps together: what one cannot do none does, or they would wait for each other for ever."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from specdec.engine import loader
from specdec.engine.captured.steps import capture_steps
from tests.support.captured_rig import CountedCapture, Pair, build, piece, random_tokens
from tests.support.interpreted_kernels import few_programs

pytest.importorskip("triton", reason="Triton is not installed here: its kernels were not interpreted")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled on this machine: see tests/gpu"
)


@pytest.fixture(scope="module", autouse=True)
def cheaply() -> Iterator[None]:
    with few_programs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.engine.captured.buckets._NUM_SEQUENCES", (1, 2))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3", tmp_path_factory.mktemp("model"))


#: What ranks ask each other, in turn: whether attention runs, whether fused kernels do, whether a size is recorded.
ATTENTION, FUSED, FIRST_SIZE = range(3)


@pytest.mark.parametrize(
    ("question", "said", "recorded"),
    [
        (ATTENTION, "paged attention does not run on another rank", "12 of 12 step graphs with gathered attention"),
        (FUSED, "fused kernels do not run on another rank", "6 of 6 step graphs with paged attention"),
        (FIRST_SIZE, "", "5 of 6 step graphs with paged attention"),
        (None, "", "6 of 6 step graphs with paged attention"),
    ],
)
def test_what_another_rank_cannot_do_is_done_without_here_too(
    question: int | None,
    said: str,
    recorded: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    answers: list[bool] = []

    def all_agree(yes: bool) -> bool:
        answers.append(yes and len(answers) != question)
        return answers[-1]

    monkeypatch.setattr(loader, "capture_steps", partial(capture_steps, all_agree=all_agree))
    pair = Pair(model, capture=CountedCapture(warms_up=False), widths=(1, 3, 5), attention="paged")
    assert f"captured {recorded}" in caplog.text
    assert said in caplog.text
    assert answers.count(False) == (question is not None)
    one, two = random_tokens(1, 40), random_tokens(2, 40)
    first, second = pair.tables[:2]
    pair.run(piece(one, 0, 20, first, 1), piece(two, 0, 9, second, 1), is_captured=False)
    pair.run(piece(one, 20, 21, first, 1))
    # The largest size is the first one.
    pair.run(piece(one, 21, 26, first, 5), piece(two, 9, 14, second, 5), is_captured=question != FIRST_SIZE)
