"""The gpu suite: silent without a device; its three figures on a tiny pair, through the same processes, on a CPU."""

from __future__ import annotations

import argparse

import pytest
import torch
from transformers import LlamaConfig

from bench import gpu, gpu_stack
from bench.rows import Row

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=4096,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)


def rows_of(*figures: str) -> list[Row]:
    return gpu.device_rows(CONFIG, "cpu", "tiny", figures, 1 << 20, quick=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_nothing_is_measured_and_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.run(argparse.Namespace(quick=True)) == []
    assert capsys.readouterr().err.count("\n") == 1


def test_each_model_gets_its_step_and_its_ratio_to_the_floor() -> None:
    found = {(row.system, row.metric): row for row in rows_of(gpu.ENGINE)}
    bytes_per_s = found["device", "copy_bandwidth"].value * 1e9
    layer, head = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 112 + 2 * 64, 64 * 4096 + 64
    for name, num_layers in (("target", 6), ("draft", 3)):
        floor_ms = 2 * (num_layers * layer + head) / bytes_per_s * 1e3  # bfloat16
        assert found[name, "step_over_floor"].value == pytest.approx(found[name, "step_ms"].value / floor_ms)


def test_one_stream_and_many_run_through_real_processes_and_say_what_limits_them() -> None:
    rows = rows_of(gpu_stack.ONE_STREAM, gpu_stack.STREAMS)
    found = {(row.system, row.metric, row.ratio_to, row.x): row for row in rows}
    ours, target_only = gpu_stack.OURS, gpu_stack.TARGET_ONLY
    assert found[ours, "tokens_per_s_ratio", target_only, None].required == 1.8
    assert found[ours, "tokens_per_s_ratio", "hf_assisted", None].required == 5.0
    assert all("understates" in row.note for row in rows)
    alpha = found[ours, "alpha", None, None]
    assert (alpha.required, alpha.at_most) == (0.75, 0.85)
    assert alpha.value == pytest.approx(found["pair", "dialled_alpha", None, None].value, abs=0.15)
    assert found[ours, "tau", None, None].value > 1.5
    for streams in gpu_stack.QUICK.concurrencies:
        for system in (gpu_stack.AUTO, target_only):
            assert found[system, "tokens_per_s", None, streams].value > 0
