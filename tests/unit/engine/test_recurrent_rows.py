"""Rows of recurrences: one after the other, in any grouping, by kernels and by PyTorch, against transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from specdec.engine.base import SliceStates
from specdec.engine.kernels.library import load_library
from specdec.engine.model import recurrent_rows
from specdec.engine.model.batch import RowSlice
from specdec.engine.model.recurrent_rows import Rows, delta_rule, scan

NUM_ROWS, HEADS, GROUPS, HEIGHT, WIDTH = 11, 4, 2, 24, 20
SHAPE = torch.Size((HEADS, HEIGHT, WIDTH))
KINDS: dict[str, Callable[..., torch.Tensor]] = {"delta rule": delta_rule, "scan": scan}


@pytest.fixture(params=["kernels", "pytorch"])
def rows_run_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    library = load_library(None) if request.param == "kernels" else None
    monkeypatch.setattr(recurrent_rows, "loaded_library", lambda: library)
    return str(request.param)


def make_rows(kind: str) -> Rows:
    generator = torch.Generator().manual_seed(3)
    heights = (WIDTH, HEIGHT) if kind == "delta rule" else (HEIGHT, WIDTH)
    return Rows(
        decay=torch.rand(NUM_ROWS, HEADS, generator=generator),
        gate=torch.rand(NUM_ROWS, HEADS, generator=generator),
        values=torch.randn(NUM_ROWS, HEADS, heights[0], generator=generator),
        write=0.3 * torch.randn(NUM_ROWS, GROUPS, heights[1], generator=generator),
        read=torch.randn(NUM_ROWS, GROUPS, heights[1], generator=generator),
    )


def part(rows: Rows, start: int, end: int) -> Rows:
    return Rows(*(getattr(rows, name)[start:end] for name in ("decay", "gate", "values", "write", "read")))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_however_they_are_grouped(kind: str, rows_run_by: str) -> None:
    rows, run = make_rows(kind), KINDS[kind]
    begin = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4))
    last = torch.empty(SHAPE)
    whole = run(rows, begin, SHAPE, [(NUM_ROWS, last)])
    for cuts in ([0, 1, 5, 11], [0, 3, 11], list(range(12))):
        state = begin.clone()  # read and written in place
        outputs = [
            run(part(rows, start, end), state, SHAPE, [(end - start, state)]) for start, end in itertools.pairwise(cuts)
        ]
        assert torch.equal(torch.cat(outputs), whole)
        assert torch.equal(state, last)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_saved_after_the_rows_that_are_asked_for(kind: str, rows_run_by: str) -> None:
    rows, run = make_rows(kind), KINDS[kind]
    saved = [torch.empty(SHAPE) for _ in range(3)]
    run(rows, None, SHAPE, [(2, saved[0]), (7, saved[1]), (7, saved[2])])
    for num_rows, state in ((2, saved[0]), (7, saved[1]), (7, saved[2])):
        alone = torch.empty(SHAPE)
        run(part(rows, 0, num_rows), None, SHAPE, [(num_rows, alone)])
        assert torch.equal(state, alone)


def test_the_delta_rule_is_that_of_transformers(rows_run_by: str) -> None:
    rows = make_rows("delta rule")
    begin, last = torch.randn(SHAPE), torch.empty(SHAPE)
    expected, state = torch_recurrent_gated_delta_rule(
        rows.read.unsqueeze(0) * HEIGHT**0.5, rows.write.unsqueeze(0), rows.values.unsqueeze(0),
        g=rows.decay.log().unsqueeze(0), beta=rows.gate.unsqueeze(0), initial_state=begin.unsqueeze(0),
        output_final_state=True,
    )  # fmt: skip
    output = delta_rule(rows, begin, SHAPE, [(NUM_ROWS, last)])
    torch.testing.assert_close(output, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, state[0], rtol=1e-4, atol=1e-5)


def test_the_scan_is_that_of_transformers(rows_run_by: str) -> None:
    rows = make_rows("scan")
    begin, last = torch.randn(SHAPE), torch.empty(SHAPE)
    speed = -torch.rand(HEADS)
    expected, state = mamba2_chunk_scan(
        rows.values.unsqueeze(0), rows.gate.unsqueeze(0), speed, rows.write.unsqueeze(0), rows.read.unsqueeze(0),
        chunk_size=4, initial_states=begin.unsqueeze(0), return_final_states=True,
    )  # fmt: skip
    decayed = Rows((speed * rows.gate).exp(), rows.gate, rows.values, rows.write, rows.read)
    output = scan(decayed, begin, SHAPE, [(NUM_ROWS, last)])
    torch.testing.assert_close(output, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, state[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("saves", [(), (3,), (40,), (3, 40), (35, 36, 80), (1, 2, 33, 34, 90)])
@pytest.mark.parametrize("num_rows", [1, 32, 33, 90])
def test_runs_cover_every_row_once_and_end_where_a_long_one_is_saved(num_rows: int, saves: tuple[int, ...]) -> None:
    wanted = tuple((end, slot) for slot, end in enumerate(saves) if end <= num_rows)
    runs = list(RowSlice(5, num_rows, SliceStates(None, wanted)).runs(32))
    assert [start for start, _, _ in runs] == [0, *(end for _, end, _ in runs[:-1])]
    assert runs[-1][1] == num_rows
    assert [(start + count, slot) for start, _, own in runs for count, slot in own] == list(wanted)
    for start, end, own in runs:
        assert end - start <= 32 or {count for count, _ in own} <= {end - start}
