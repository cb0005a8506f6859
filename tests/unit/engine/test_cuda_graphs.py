"""CUDA graphs without a GPU: padding, other rows, block tables, and failures to record."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.contract.errors import Unsupported
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import StepPlan
from specdec.engine.model.kv_cache import KvCache
from tests.support.cuda_graphs_rig import (
    MIXED_LAYERS,
    NAN_TOKEN_ID,
    NUM_BLOCKS,
    CountedCapture,
    Pair,
    build,
    check_ragged_steps,
    load,
    piece,
    random_tokens,
    record_on_tape,
)
from tests.support.tiny_models import build_tiny_model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model with windowed and full layers and a head size that the native kernels do not support."""
    unaligned = MIXED_LAYERS | {"head_dim": 22}  # not a multiple of any vector width
    return build("qwen3", tmp_path_factory.mktemp("mixed"), config_overrides=unaligned)


@pytest.fixture(scope="module")
def pair(mixed: Path) -> Pair:
    return Pair(mixed)


def test_mixed_steps_equal_eager_steps(pair: Pair) -> None:
    check_ragged_steps(pair)


def test_a_replay_does_not_depend_on_the_recorded_step(tmp_path: Path) -> None:
    """Steps are recorded on padding. Replayed like a CUDA graph, they compute the content of the buffers."""
    model = build("qwen3", tmp_path, config_overrides=MIXED_LAYERS | {"max_position_embeddings": 160})
    pair = Pair(model, capture=record_on_tape, widths=(1, 3))
    one, two = random_tokens(14, 120), random_tokens(15, 120)
    pair.run(piece(one, 0, 40, pair.tables[0], 1), piece(two, 0, 9, pair.tables[1], 1), uses_cuda_graphs=False)
    ends = [40, 9]
    for widths in ((3, 1), (2, 3), (1, 0), (3, 3), (0, 2), (1, 1), (3, 2), (2, 3), (3, 3)):
        slices = []
        for index, (tokens, width) in enumerate(zip((one, two), widths, strict=True)):
            if width:
                table = pair.tables[index]
                slices.append(piece(tokens, ends[index], ends[index] + width, table, width))
            ends[index] += width
        pair.run(*slices)


def test_the_tape_refuses_operations_that_cannot_be_recorded() -> None:
    """Negative control."""
    numbers, output = torch.ones(3), torch.zeros(3)
    impossible: tuple[Callable[[], Any], ...] = (
        lambda: output.fill_(float(numbers.sum())),
        lambda: output.zero_() if (numbers > 0).all() else None,
        lambda: output[:1].copy_(numbers[numbers > 0][:1]),
        lambda: output.copy_(numbers[[0, 1, 2]]),
    )
    for step in impossible:
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            record_on_tape(step)
    factor = 2

    def step_with_a_number_of_the_host() -> None:
        torch.mul(numbers + numbers, factor, out=output)

    replay = record_on_tape(step_with_a_number_of_the_host)
    factor = 1000
    numbers.fill_(5.0)
    replay()
    assert output.tolist() == [20.0] * 3


def test_steps_that_exceed_all_buckets_run_eagerly_over_the_same_cache(pair: Pair) -> None:
    left, right = random_tokens(3, 100), random_tokens(4, 100)
    pair.run(piece(left, 0, 40, pair.tables[0], 1), piece(right, 0, 33, pair.tables[1], 1), uses_cuda_graphs=False)
    pair.run(piece(left, 40, 45, pair.tables[0], 5), piece(right, 33, 34, pair.tables[1], 1))
    pair.run(piece(left, 45, 51, pair.tables[0], 6), uses_cuda_graphs=False)
    pair.run(*[piece(right, 34, 35, pair.tables[1], 1)] * 65, uses_cuda_graphs=False)  # more sequences than any bucket
    pair.run(piece(left, 51, 54, pair.tables[0], 3))


def test_a_step_writes_only_its_own_slots_and_the_scratch_block(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[KvCache] = []

    def watched(*arguments: Any, **options: Any) -> KvCache:
        caches.append(KvCache(*arguments, **options))
        return caches[-1]

    monkeypatch.setattr("specdec.engine.load_pipeline.KvCache", watched)
    worker = load(mixed, capture=CountedCapture())
    (cache,) = caches
    assert (worker.shape.num_kv_blocks, cache.num_blocks) == (NUM_BLOCKS, NUM_BLOCKS + 1)
    for layer in cache.layers:
        layer.rows.fill_(7.0)
    tokens = random_tokens(5, 40)
    # Three sequences in a bucket of four, with one or two rows in a width of three.
    slices = (
        piece(tokens, 20, 21, (4, 9), 1),
        piece(tokens, 30, 32, (11, 3), 2),
        piece(tokens, 14, 17, (20, 30), 3),
    )
    worker.execute(StepPlan(slices))
    written = {9 * BLOCK_TOKENS + 4, 3 * BLOCK_TOKENS + 14, 3 * BLOCK_TOKENS + 15, 20 * BLOCK_TOKENS + 14,
               20 * BLOCK_TOKENS + 15}  # fmt: skip
    written |= {30 * BLOCK_TOKENS + offset for offset in range(BLOCK_TOKENS)}  # opened, so cleared first
    for layer in cache.layers:
        changed = {slot for slot, row in enumerate(layer.rows) if not (row == 7.0).all()}
        assert {slot for slot in changed if slot < NUM_BLOCKS * BLOCK_TOKENS} == written


def test_a_row_does_not_depend_on_the_other_rows(pair: Pair) -> None:
    tokens, others = random_tokens(6, 60), random_tokens(7, 600)
    for worker in (pair.eager, pair.recorded):
        worker.execute(StepPlan((piece(tokens, 0, 40, pair.tables[1], 0),)))
        worker.execute(StepPlan((piece(others, 0, 560, pair.tables[0], 0),)))
    alone = pair.run(piece(tokens, 40, 42, pair.tables[1], 2))
    for num_rows in (1, 4):
        step = (piece(others, 560, 560 + num_rows, pair.tables[0], 1), piece(tokens, 40, 42, pair.tables[1], 2))
        torch.testing.assert_close(pair.run(*step)[1:], alone, rtol=0, atol=1e-5)


def test_nans_of_former_owners_and_of_other_sequences_do_not_spread(pair: Pair) -> None:
    one, two = random_tokens(8, 60), random_tokens(9, 60)
    for table in pair.tables[1:3]:
        poisoned = pair.run(piece([NAN_TOKEN_ID] * 90, 0, 90, table, 1), uses_cuda_graphs=False)
        assert poisoned.isnan().all()
    for start in range(0, 60, 3):
        # The sequence of NaNs also writes them to padding, whose keys are in the scratch block.
        poison = piece([NAN_TOKEN_ID] * 60, start, start + 1, pair.tables[3], 1)
        first = piece(one, start, start + 3, pair.tables[1], 3)
        logits = pair.run(first, piece(two, start, start + 2, pair.tables[2], 2), poison)
        assert logits[:5].isfinite().all()
        pair.run(piece(two, start + 2, start + 3, pair.tables[2], 1))


def test_returned_logits_are_not_changed_by_the_next_step(pair: Pair) -> None:
    tokens = random_tokens(10, 20)
    first = pair.run(piece(tokens, 0, 3, pair.tables[0], 3))
    kept = first.clone()
    pair.run(piece(tokens, 3, 6, pair.tables[0], 3))
    assert torch.equal(first, kept)


def failing(_: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing\nand much more")


def specdec_records(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name.startswith("specdec")]


def test_by_default_a_failed_recording_logs_one_warning_and_steps_run_eagerly(
    mixed: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # without a compiler, native kernels are not compiled
    worker = load(mixed, "auto", capture=failing)
    warnings = [message for level, message in specdec_records(caplog) if level == "WARNING"]
    assert len([message for message in warnings if "captur" in message]) == 1
    assert "operation not permitted when stream is capturing; running eagerly" in caplog.text
    assert "much more" not in caplog.text
    step = StepPlan((piece(random_tokens(11, 3), 0, 3, (5,), 3),))
    torch.testing.assert_close(worker.execute(step), load(mixed, "eager").execute(step), rtol=0, atol=0)


def test_a_failed_recording_is_an_error_if_the_backend_is_named(mixed: Path) -> None:
    with pytest.raises(Unsupported, match=r"CUDA graphs failed: operation not permitted .* capturing$") as raised:
        load(mixed, capture=failing)
    assert raised.value.field == "compile_backend"


def test_the_named_backend_needs_a_cuda_device(mixed: Path) -> None:
    with pytest.raises(Unsupported, match="CUDA graphs need a CUDA device, not cpu") as raised:
        load(mixed)
    assert raised.value.field == "compile_backend"


def test_other_models_are_refused_by_the_named_backend_and_run_eagerly_by_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    model = build_tiny_model("gpt2", tmp_path, num_layers=1)
    with pytest.raises(Unsupported, match="type gpt2 cannot run as CUDA graphs"):
        load(model, capture=CountedCapture())
    worker = load(model, "auto", capture=CountedCapture())
    assert "type gpt2 cannot run as CUDA graphs; running eagerly" in caplog.text
    assert worker.execute(StepPlan((piece([2, 3], 0, 2, (5,), 2),))).shape == (2, 256)


def test_buckets_without_memory_stay_eager_and_the_others_are_recorded(
    mixed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    direct = CountedCapture()
    attempts = []

    def cramped(step: Callable[[], None]) -> Callable[[], None]:
        attempts.append(step)
        if len(attempts) <= 6:  # the six buckets of 64 sequences
            raise torch.OutOfMemoryError("no room")
        return direct(step)

    pair = Pair(mixed)
    pair.recorded, pair.capture = load(mixed, capture=cramped), direct
    assert f"recorded {len(attempts) - 6} of {len(attempts)} CUDA graphs with gathered attention" in caplog.text
    one = piece(random_tokens(12, 1), 0, 1, pair.tables[0], 1)
    pair.run(*[one] * 32)
    pair.run(*[one] * 33, uses_cuda_graphs=False)


def test_recording_logs_its_progress(mixed: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    load(mixed, capture=CountedCapture())
    shown = [record.progress for record in caplog.records if hasattr(record, "progress")]
    assert shown == [f"{part}/7" for part in range(1, 8)]


def test_without_triton_attention_is_gathered_after_one_warning(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    monkeypatch.setitem(sys.modules, "triton", None)
    pair = Pair(mixed, attention="paged")
    (warning,) = (message for level, message in specdec_records(caplog) if level == "WARNING")
    assert warning.startswith("paged attention failed its trial: ")
    assert "triton" in warning
    assert "with gathered attention" in caplog.text
    pair.run(piece(random_tokens(13, 5), 0, 5, pair.tables[1], 5))
