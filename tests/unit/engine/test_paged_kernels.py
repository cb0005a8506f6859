"""The kernels of paged attention in Triton's interpreter, against attention in float64, row by row.

Whatever a row must not read is NaN: pages that are nobody's, the rest of a last page, pages after a table's end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.engine.cuda_graphs.paged_attention import RaggedRows, Splitting, paged_attention
from tests.support.paged_rig import SMALL, TOLERANCE, Heads, Part, Step, batch, check

pytest.importorskip("triton", reason="Triton is not installed here: its kernels were not interpreted")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled on this machine: see tests/gpu"
)

# A draft step, a verification, a chunk of a prompt behind a prefix, one that begins, a first token.
MIXED = batch((70, 1), (29, 5), (15, 20), (0, 9), (0, 1))
ONE_SPLIT = replace(SMALL, num_splits=1)


def test_draft_steps_verifications_and_chunks_of_prompts_share_a_launch() -> None:
    check(Step(Heads(), MIXED))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_heads_of_any_size_are_right(dim: int) -> None:
    check(Step(Heads(dim, num_kv=2), batch((20, 1), (14, 3))))


def test_values_may_be_of_another_size_than_keys() -> None:
    check(Step(Heads(48, num_kv=2, value_dim=32), batch((20, 2))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    check(Step(Heads(per_kv=4), batch((150, 1), (14, 3)), dtype))


@pytest.mark.parametrize(("num_kv", "per_kv"), [(2, 1), (1, 3), (2, 4), (1, 12)])
def test_heads_that_share_keys_are_right(num_kv: int, per_kv: int) -> None:
    """Rows of a product are heads of some queries; of 3 and 12 heads, some of its rows are nobody's."""
    check(Step(Heads(num_kv=num_kv, per_kv=per_kv), batch((33, 1), (5, 9 if per_kv < 4 else 6))))


@pytest.mark.parametrize("window", [1, 40, 100])
def test_a_window_ends_where_it_should(window: int) -> None:
    check(Step(Heads(window=window, per_kv=1), batch((150, 1), (61, 5), (0, 3))))


@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_scores_are_capped(softcap: float) -> None:
    check(Step(Heads(softcap=softcap), batch((40, 2))))
    check(Step(Heads(softcap=softcap, window=9), batch((40, 2))))


def test_contexts_that_end_about_a_page_a_tile_or_a_unit_are_right() -> None:
    check(Step(Heads(per_kv=1), batch(*((start, 1) for start in (0, 14, 15, 16, 17, 30, 31, 32, 33, 127, 128, 129)))))


def test_the_splitting_that_is_shipped_is_right() -> None:
    check(Step(Heads(), batch((300, 2), (40, 1))), Splitting())


def test_more_sequences_than_one_load_holds_are_right() -> None:
    rows = {0, 40, 63, 64, 65}
    check(Step(Heads(per_kv=1), batch(*((index % 5, int(index in rows)) for index in range(66)))), ONE_SPLIT)


def test_sequences_without_rows_are_nobody_s() -> None:
    check(Step(Heads(), batch((20, 0), (3, 2), (7, 0), (30, 1), (5, 0))))


def test_a_row_before_the_first_position_gets_zeros() -> None:
    """Padding stands before a sequence's own rows."""
    step = Step(Heads(), batch((0, 5)))
    rows = replace(step.rows, lengths=torch.tensor([2]))
    output = paged_attention(step.query, step.layer, step.heads.kind, rows, scale=0.125, splitting=SMALL)
    assert (output[:3] == 0).all()
    values = step.layer.pages()[1][step.tables[0], :1]
    torch.testing.assert_close(output[3], values[0].expand(2, -1), rtol=0, atol=1e-6)


def test_queries_that_lie_apart_are_read_where_they_lie() -> None:
    step = Step(Heads(), batch((15, 1), (3, 2)))
    wide = torch.full((len(step.query), 5, 64), torch.nan)
    wide[:, :2] = step.query
    expected, step.query = step.attend(), wide[:, :2]
    assert torch.equal(step.attend(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    """Company: other sequences before and after it, other pages, and other rows of its own sequence."""
    for heads, start in ((Heads(), 0), (Heads(), 150), (Heads(window=60), 150)):
        alone = Step(heads, [Part(start, 1, seed=3)], dtype).attend()[0]
        verification = Step(heads, [*batch((41, 3)), Part(start, 5, seed=3), *batch((9, 1))], dtype, shuffle=1)
        assert torch.equal(verification.attend()[3], alone)
    chunk = Step(heads, [Part(start - 9, 11, seed=3)], dtype, shuffle=2)
    assert torch.equal(chunk.attend()[9], alone)


def test_a_wrong_page_is_noticed() -> None:
    """Negative control: of the reference, of its tolerance, and of the pages that are nobody's."""
    step = Step(Heads(), batch((70, 1), (70, 1)))
    tables = step.tables.clone()
    tables[0] = step.rows.tables[step.rows.table_firsts[1]]  # the other sequence's
    step.rows = replace(step.rows, tables=tables)
    difference = (step.attend() - step.expected()).abs().amax(dim=(1, 2))
    assert difference[0] > 100 * TOLERANCE[torch.float32] > 100 * difference[1]
    step = Step(Heads(), batch((70, 1)))
    step.rows = RaggedRows(step.rows.first_rows, step.rows.lengths + 1, step.tables, step.rows.table_firsts)
    assert step.attend().isnan().all()


def test_kernels_compile_for_a_hopper_card(tmp_path: Path) -> None:
    """With its tensor cores, keys on their way before they are wanted, and nothing that spills out of registers."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    report = subprocess.run(
        [sys.executable, "-m", "tests.support.kernel_compilation", "attention"],
        cwd=Path(__file__).parents[3], env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    kernels = json.loads(report.stdout)
    for kernel in kernels.values():
        assert kernel["machine_code_bytes"] > 0
        assert kernel["shared_bytes"] <= 100_000  # two programs and more to a processor
        assert kernel["stack_bytes"] == 0
    for name in ("llama", "gemma", "wide"):
        assert kernels[name]["uses_tensor_cores"]
        assert kernels[name]["copies_ahead"]
