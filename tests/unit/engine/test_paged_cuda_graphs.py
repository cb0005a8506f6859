"""CUDA graphs with the paged attention kernels in Triton's interpreter, and the trial of the kernels."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.engine.base import StepPlan
from specdec.engine.cuda_graphs import fused_operations
from specdec.engine.cuda_graphs import paged_attention as module
from specdec.engine.cuda_graphs.fused_operations import ProgramSizes
from specdec.engine.cuda_graphs.paged_attention import ContextSplit, RaggedRows, paged_attention
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from tests.support.cuda_graphs_rig import (
    MIXED_LAYERS,
    NAN_TOKEN_ID,
    CountedCapture,
    Pair,
    build,
    check_ragged_steps,
    load,
    piece,
    random_tokens,
    record_on_tape,
)
from tests.support.fused_rig import round_bfloat16
from tests.support.interpreted_kernels import kernels_on_tape

pytest.importorskip("triton", reason="Triton is not installed here: its kernels were not interpreted")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled on this machine: see tests/gpu"
)


#: Of a trained model's greedy text.
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model with windowed and full layers."""
    return build("qwen3", tmp_path_factory.mktemp("mixed"), config_overrides=MIXED_LAYERS)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one program per tile and KV head: the interpreter takes milliseconds for each. Other tests cover splits."""
    few = ContextSplit(tile_keys=64, unit_tiles=1, num_splits=1, tile_outputs=64)
    monkeypatch.setattr(module, "ContextSplit", lambda: few)
    monkeypatch.setattr(fused_operations, "ProgramSizes", lambda: ProgramSizes(64, 512, 1 << 14))


def counted() -> CountedCapture:
    return CountedCapture(warms_up=False)


def test_steps_with_the_kernels_equal_eager_steps(mixed: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    pair = Pair(mixed, capture=counted(), attention="paged", self_check=True)
    # One graph for all contexts: 1, 2, 4 ... 64 sequences of 1, 3 and 5 rows.
    assert "recorded 21 of 21 CUDA graphs with paged attention" in caplog.text
    check_ragged_steps(pair, num_steps=4)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_nans_of_former_owners_and_of_other_sequences_do_not_spread(mixed: Path) -> None:
    pair = Pair(mixed, capture=counted(), attention="paged")
    for table in pair.tables[1:3]:
        assert pair.run(piece([NAN_TOKEN_ID] * 90, 0, 90, table, 1), uses_cuda_graphs=False).isnan().all()
    one, two = random_tokens(8, 60), random_tokens(9, 60)
    pair.run(piece(one, 0, 12, pair.tables[1], 1), piece(two, 0, 12, pair.tables[2], 1), uses_cuda_graphs=False)
    for start in range(12, 18, 3):  # across the end of a block
        poison = piece([NAN_TOKEN_ID] * 60, start, start + 1, pair.tables[3], 1)
        first = piece(one, start, start + 3, pair.tables[1], 3)
        assert pair.run(first, piece(two, start, start + 3, pair.tables[2], 2), poison)[:5].isfinite().all()


def test_a_replay_does_not_depend_on_the_recorded_step(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded on padding."""
    monkeypatch.setattr("specdec.engine.cuda_graphs.buckets._NUM_SEQUENCES", (1, 2))
    with kernels_on_tape():
        pair = Pair(mixed, capture=record_on_tape, widths=(1, 3), attention="paged")
        one, two = random_tokens(14, 60), random_tokens(15, 60)
        pair.run(piece(one, 0, 40, pair.tables[0], 1), piece(two, 0, 9, pair.tables[1], 1), uses_cuda_graphs=False)
        ends = [40, 9]
        for widths in ((3, 1), (2, 3), (0, 2)):
            slices = []
            for index, (tokens, width) in enumerate(zip((one, two), widths, strict=True)):
                if width:
                    slices.append(piece(tokens, ends[index], ends[index] + width, pair.tables[index], width))
                ends[index] += width
            pair.run(*slices)


def test_steps_that_no_graph_holds_use_the_kernels_without_gathering_or_masking(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.engine.cuda_graphs.ragged_steps._MOST_ROWS", 16)  # a chunk takes several launches
    pair = Pair(mixed, capture=counted(), attention="paged")
    one, two = random_tokens(16, 80), random_tokens(17, 40)
    pair.run(piece(one, 0, 40, pair.tables[0], 1), uses_cuda_graphs=False)
    # A chunk behind a prefix, a prompt from its first token, a draft step.
    mixture = StepPlan((
        piece(one, 40, 61, pair.tables[0], 2), piece(two, 0, 18, pair.tables[1], 0), piece(two, 0, 1, pair.tables[2], 1)
    ))  # fmt: skip
    expected = pair.eager.execute(mixture)

    def laid_out(*_: Any, **__: Any) -> None:
        raise AssertionError("contexts are laid out to be gathered")

    with monkeypatch.context() as patched:
        patched.setattr("specdec.engine.model.model_runner.build_batch", laid_out)
        actual = pair.recorded.execute(mixture)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    pair.run(piece(one, 61, 66, pair.tables[0], 5), piece(two, 18, 19, pair.tables[1], 1))


def lengths_off_by_one(*args: Any, **kwargs: Any) -> torch.Tensor:
    query, layer, kind, rows = args
    return paged_attention(query, layer, kind, replace(rows, lengths=rows.lengths - 1), **kwargs)


def window_off_by_one(*args: Any, **kwargs: Any) -> torch.Tensor:
    query, layer, kind, rows = args
    return paged_attention(query, layer, replace(kind, window=kind.window and kind.window - 1), rows, **kwargs)


def without_tables(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Ignore the block table and read consecutive blocks."""
    query, layer, kind, rows = args
    in_order = torch.arange(len(rows.tables)) % len(layer.blocks)
    return paged_attention(query, layer, kind, RaggedRows(rows.first_rows, rows.lengths, in_order, rows.table_firsts),
                           **kwargs)  # fmt: skip


def failing(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("ptxas fatal: no such architecture\nand much more")


@pytest.mark.parametrize("wrong", [lengths_off_by_one, window_off_by_one, without_tables])
def test_the_trial_finds_kernels_with_wrong_results(
    wrong: Callable[..., torch.Tensor], mixed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Negative control of the trial."""
    caplog.set_level(logging.INFO, logger="specdec")
    monkeypatch.setattr(module, "paged_attention", wrong)
    load(mixed, capture=counted(), attention="paged", self_check=False)
    assert re.search(
        r"paged attention differs from gathered attention by [0-9.einf]+, limit 0.05; using gathered", caplog.text
    )
    assert "with gathered attention" in caplog.text


def test_kernels_that_fail_to_run_log_one_warning_and_attention_is_gathered(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    monkeypatch.setattr(module, "paged_attention", failing)
    pair = Pair(mixed, capture=counted(), attention="paged")
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("paged attention failed its trial: ptxas fatal: no such architecture; using gathered")
    assert "with gathered attention" in caplog.text
    pair.run(piece(random_tokens(13, 5), 0, 5, pair.tables[1], 5))


def test_a_cpu_uses_gathered_attention_without_a_trial(mixed: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    load(mixed, capture=counted())
    assert "with gathered attention" in caplog.text


# The first test compares logits in float32, which is stricter.
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_a_trained_model_writes_the_greedy_text_of_eager_steps(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    round_bfloat16(monkeypatch)
    monkeypatch.setattr("specdec.engine.cuda_graphs.buckets._NUM_SEQUENCES", (1,))
    demo = Path(__file__).parents[3] / "models" / "demo" / "draft"
    texts = {}
    for backend in ("eager", "cuda-graphs"):
        capture = counted()
        compiling = CompileOptions(backend, row_counts=(1,), capture=capture, attention="paged")
        worker = load_worker(
            LoadRequest(str(demo), device="cpu", dtype=dtype, num_kv_blocks=4, compiling=compiling, self_check=False)
        )
        tokens, done = [1, 400, 301, 7, 950, 33, 1200], 0
        for _ in range(NUM_TOKENS):
            logits = worker.execute(StepPlan((piece(tokens, done, len(tokens), (2, 0, 3, 1), 1),)))
            done = len(tokens)
            tokens.append(int(logits[0].argmax()))
        texts[backend] = tokens
    assert capture.num_replays >= NUM_TOKENS - 1  # and those of the trials
    assert texts["cuda-graphs"] == texts["eager"]
