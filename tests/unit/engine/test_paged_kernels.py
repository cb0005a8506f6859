"""The kernels of paged attention in Triton's interpreter, against attention in float64, row by row.

Numbers that a row must not read are NaN: unused blocks, the unused part of a last block, blocks past a table's end.
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

from specdec.engine.cuda_graphs.paged_attention import ContextSplit, RaggedRows, paged_attention
from tests.support.paged_rig import SMALL, TOLERANCE, Heads, Part, Step, batch, check

pytest.importorskip("triton", reason="Triton is not installed here: its kernels were not interpreted")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled on this machine: see tests/gpu"
)

# A draft step, a verification, a chunk behind a prefix, a prompt's first chunk, a first token.
MIXED = batch((70, 1), (29, 5), (15, 20), (0, 9), (0, 1))
ONE_SPLIT = replace(SMALL, num_splits=1)


def test_draft_steps_verifications_and_prompt_chunks_share_a_launch() -> None:
    check(Step(Heads(), MIXED))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_heads_of_any_size_are_supported(dim: int) -> None:
    check(Step(Heads(dim, num_kv=2), batch((20, 1), (14, 3))))


def test_values_may_differ_in_size_from_keys() -> None:
    check(Step(Heads(48, num_kv=2, value_dim=32), batch((20, 2))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    check(Step(Heads(per_kv=4), batch((150, 1), (14, 3)), dtype))


@pytest.mark.parametrize(("num_kv", "per_kv"), [(2, 1), (1, 3), (2, 4), (1, 12)])
def test_any_number_of_heads_may_share_keys(num_kv: int, per_kv: int) -> None:
    """A product's rows are the heads of some queries; with 3 and 12 heads, some of the rows are padding."""
    check(Step(Heads(num_kv=num_kv, per_kv=per_kv), batch((33, 1), (5, 9 if per_kv < 4 else 6))))


@pytest.mark.parametrize("window", [1, 40, 100])
def test_a_window_limits_the_visible_keys(window: int) -> None:
    check(Step(Heads(window=window, per_kv=1), batch((150, 1), (61, 5), (0, 3))))


@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_scores_are_capped(softcap: float) -> None:
    check(Step(Heads(softcap=softcap), batch((40, 2))))
    check(Step(Heads(softcap=softcap, window=9), batch((40, 2))))


def test_contexts_may_end_near_the_end_of_a_block_a_tile_or_a_unit() -> None:
    check(Step(Heads(per_kv=1), batch(*((start, 1) for start in (0, 14, 15, 16, 17, 30, 31, 32, 33, 127, 128, 129)))))


def test_the_default_splitting_gives_the_expected_attention() -> None:
    check(Step(Heads(), batch((300, 2), (40, 1))), ContextSplit())


def test_a_step_may_have_more_sequences_than_one_load_holds() -> None:
    rows = {0, 40, 63, 64, 65}
    check(Step(Heads(per_kv=1), batch(*((index % 5, int(index in rows)) for index in range(66)))), ONE_SPLIT)


def test_sequences_without_rows_have_no_effect() -> None:
    check(Step(Heads(), batch((20, 0), (3, 2), (7, 0), (30, 1), (5, 0))))


def test_a_row_before_the_first_position_gets_zeros() -> None:
    """Padding rows precede a sequence's own rows."""
    step = Step(Heads(), batch((0, 5)))
    rows = replace(step.rows, lengths=torch.tensor([2]))
    output = paged_attention(step.query, step.layer, step.heads.kind, rows, scale=0.125, splitting=SMALL)
    assert (output[:3] == 0).all()
    values = step.layer.pages()[1][step.tables[0], :1]
    torch.testing.assert_close(output[3], values[0].expand(2, -1), rtol=0, atol=1e-6)


def test_queries_with_a_stride_are_read_in_place() -> None:
    step = Step(Heads(), batch((15, 1), (3, 2)))
    wide = torch.full((len(step.query), 5, 64), torch.nan)
    wide[:, :2] = step.query
    expected, step.query = step.attend(), wide[:, :2]
    assert torch.equal(step.attend(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_other_rows(dtype: torch.dtype) -> None:
    """Other rows: sequences before and after it, other blocks, and further rows of its own sequence."""
    for heads, start in ((Heads(), 0), (Heads(), 150), (Heads(window=60), 150)):
        alone = Step(heads, [Part(start, 1, seed=3)], dtype).attend()[0]
        verification = Step(heads, [*batch((41, 3)), Part(start, 5, seed=3), *batch((9, 1))], dtype, shuffle=1)
        assert torch.equal(verification.attend()[3], alone)
    chunk = Step(heads, [Part(start - 9, 11, seed=3)], dtype, shuffle=2)
    assert torch.equal(chunk.attend()[9], alone)


def test_a_wrong_block_is_noticed() -> None:
    """Negative control of the reference, its tolerance, and the blocks that no sequence has."""
    step = Step(Heads(), batch((70, 1), (70, 1)))
    tables = step.tables.clone()
    tables[0] = step.rows.tables[step.rows.table_firsts[1]]  # a block of the other sequence
    step.rows = replace(step.rows, tables=tables)
    difference = (step.attend() - step.expected()).abs().amax(dim=(1, 2))
    assert difference[0] > 100 * TOLERANCE[torch.float32] > 100 * difference[1]
    step = Step(Heads(), batch((70, 1)))
    step.rows = RaggedRows(step.rows.first_rows, step.rows.lengths + 1, step.tables, step.rows.table_firsts)
    assert step.attend().isnan().all()


def test_kernels_compile_for_a_hopper_gpu(tmp_path: Path) -> None:
    """They use tensor cores, load keys asynchronously and do not spill registers."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    report = subprocess.run(
        [sys.executable, "-m", "tests.support.kernel_compilation", "attention"],
        cwd=Path(__file__).parents[3], env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    kernels = json.loads(report.stdout)
    for kernel in kernels.values():
        assert kernel["machine_code_bytes"] > 0
        assert kernel["shared_bytes"] <= 100_000  # two or more programs per multiprocessor
        assert kernel["stack_bytes"] == 0
    for name in ("llama", "gemma", "wide"):
        assert kernels[name]["uses_tensor_cores"]
        assert kernels[name]["copies_ahead"]
