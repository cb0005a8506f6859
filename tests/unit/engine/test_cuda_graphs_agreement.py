"""Ranks that record CUDA graphs together agree on the kernels, or the start fails; no rank waits for ever."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from specdec.contract.errors import Unsupported
from specdec.engine.loader import WholeModel
from tests.support.cuda_graphs_rig import CountedCapture, Pair, build, load, piece, random_tokens
from tests.support.interpreted_kernels import cheap_recordings, require_interpreter


@pytest.fixture(scope="module", autouse=True)
def cheaply() -> Iterator[None]:
    require_interpreter()
    with cheap_recordings():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3", tmp_path_factory.mktemp("model"))


#: Questions that ranks agree on, in order: whether attention runs, and whether fused kernels run.
ATTENTION, FUSED = range(2)


@pytest.mark.parametrize(
    ("question", "said", "recorded"),
    [
        (ATTENTION, "paged attention failed its trial on another rank", "12 of 12 CUDA graphs with gathered attention"),
        (FUSED, "fused kernels failed their trial on another rank", "6 of 6 CUDA graphs with paged attention"),
        (None, "", "6 of 6 CUDA graphs with paged attention"),
    ],
)
def test_a_rank_does_without_kernels_that_another_rank_lacks(
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

    monkeypatch.setattr(WholeModel, "all_agree", staticmethod(all_agree))
    pair = Pair(model, capture=CountedCapture(warms_up=False), widths=(1, 3, 5), attention="paged")
    assert f"recorded {recorded}" in caplog.text
    assert said in caplog.text
    assert answers.count(False) == (question is not None)
    one, two = random_tokens(1, 40), random_tokens(2, 40)
    first, second = pair.tables[:2]
    pair.run(piece(one, 0, 20, first, 1), piece(two, 0, 9, second, 1), uses_cuda_graphs=False)
    pair.run(piece(one, 20, 25, first, 5), piece(two, 9, 10, second, 1))


class NoRoom:
    """A capture function whose device memory is full after a number of recorded steps."""

    def __init__(self, num_steps: int) -> None:
        self._num_left = num_steps

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self._num_left -= 1
        if self._num_left < 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_failure_while_ranks_record_together_ends_the_start(
    num_steps: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure comes in the trial of the fused kernels or during recording; one process alone would continue."""
    load(model, capture=NoRoom(num_steps), attention="paged")
    monkeypatch.setattr(WholeModel, "all_agree", bool)
    with pytest.raises(Unsupported, match="recording CUDA graphs failed: CUDA out of memory") as caught:
        load(model, capture=NoRoom(num_steps), attention="paged")
    assert caught.value.field == "compile_backend"
