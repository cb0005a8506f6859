"""The gpu suite: silent without a device, and sums that hold on any device."""

from __future__ import annotations

import argparse
import contextlib
import io
from functools import partial

import pytest
import torch
from transformers import LlamaConfig

from bench.harness.rows import Origin, Row
from bench.suites.gpu import suite as gpu
from bench.suites.gpu.attention import attention_rows

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


@pytest.fixture(scope="module")
def measured() -> tuple[list[Row], str]:
    """Rows of the tiny model's steps on this CPU, and what was written to stderr about others."""
    with contextlib.redirect_stderr(io.StringIO()) as written:
        rows = gpu.device_rows(CONFIG, "cpu", "tiny", [gpu.ENGINE], 1 << 20, quick=True)
    return rows, written.getvalue()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_nothing_is_measured_and_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.run(argparse.Namespace(quick=True)) == []
    assert capsys.readouterr().err.count("\n") == 1


def test_with_fewer_devices_than_ranks_nothing_is_measured_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpu.run(argparse.Namespace(quick=True, tensor_parallel=2)) == []
    assert capsys.readouterr().err == "bench gpu: 2 GPUs are needed, this machine has 1; nothing was measured\n"


def test_each_model_gets_its_step_and_its_ratio_to_the_floor(measured: tuple[list[Row], str]) -> None:
    found = {(row.system, row.metric): row for row in measured[0]}
    bytes_per_s = found["device", "copy_bandwidth"].value * 1e9
    layer, head = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 112 + 2 * 64, 64 * 4096 + 64
    for name, num_layers in (("target", 6), ("draft", 3)):
        floor_ms = 2 * (num_layers * layer + head) / bytes_per_s * 1e3  # bfloat16
        assert found[name, "step_over_floor"].value == pytest.approx(found[name, "step_ms"].value / floor_ms)


def test_int8_and_deterministic_steps_are_set_against_the_target_s_own(measured: tuple[list[Row], str]) -> None:
    rows, written = measured
    found = {(row.system, row.metric): row for row in rows}
    ratio, step = found["target, int8", "step_rate_ratio"], found["target, int8", "step_ms"]
    assert ratio.value == pytest.approx(found["target", "step_ms"].value / step.value)
    assert (ratio.ratio_to, ratio.required) == ("target", 1.5)
    # Native kernels do not compute bfloat16 on a CPU.
    assert "bench gpu: target, deterministic: --deterministic on cpu needs native kernels" in written
    assert not any(row.system == "target, deterministic" for row in rows)


def test_both_attentions_of_a_step_are_timed_where_they_run(capsys: pytest.CaptureFixture[str]) -> None:
    row = partial(Row, suite="gpu", row=None, origin=Origin(), quick=True)
    rows = attention_rows(CONFIG, "cpu", "tiny", row, 1e9, sizes=[(2, 20), (65, 20)])
    systems = {row.system for row in rows}
    assert "gathered" in systems
    # 2 sequences of 20 tokens, 2 heads of 16 keys and values, two bytes each.
    floor_us = 2 * 20 * 2 * 2 * 16 * 2 / 1e9 * 1e6
    for system in systems:
        found = {row.metric: row.value for row in rows if row.system == system}
        assert found["layer_over_floor"] == pytest.approx(found["layer_us"] / floor_us)
    missing = {"paged", "gathered"} - systems
    said = capsys.readouterr().err
    assert all(f"bench gpu: {name} attention: " in said for name in missing)
    assert "bench gpu: gathered attention: no step of 65 sequences of 20 tokens is recorded" in said
