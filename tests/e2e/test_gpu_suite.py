"""The gpu suite's whole stack on a CPU: a tiny pair, the real services and the real peer."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from bench.suites.gpu import stack as gpu_stack
from bench.suites.gpu import suite as gpu

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


@pytest.mark.full
def test_a_divided_models_step_is_measured_against_the_whole_models() -> None:
    (row,) = gpu.divided_rows(CONFIG, "cpu", "tiny", 2, quick=True)
    assert (row.system, row.ratio_to, row.case) == ("2 ranks", "1 rank", "tiny, 5 rows")
    assert row.value > 0


@pytest.mark.full
def test_one_stream_and_many_are_measured_with_their_limits_and_with_what_limits_them() -> None:
    figures = [gpu_stack.ONE_STREAM, gpu_stack.STREAMS]
    rows = gpu.device_rows(CONFIG, "cpu", "tiny", figures, 1 << 20, quick=True)
    found = {(row.system, row.metric, row.ratio_to, row.x): row for row in rows}
    ours, target_only = gpu_stack.OURS, gpu_stack.TARGET_ONLY
    assert found[ours, "tokens_per_s_ratio", target_only, None].required == 1.8
    assert found[ours, "tokens_per_s_ratio", "hf_assisted", None].required == 5.0
    assert all(row.note and "share one device" in row.note for row in rows)
    # Dialled on other prompts than those that count, and both few.
    assert found["pair", "dialled_alpha", None, None].value == pytest.approx(gpu.ALPHA, abs=0.05)
    assert found[ours, "alpha", None, None].value == pytest.approx(gpu.ALPHA, abs=0.2)
    assert found[ours, "tau", None, None].value > 1.5
    for streams in gpu_stack.QUICK.concurrencies:
        for system in (gpu_stack.AUTO, target_only):
            assert found[system, "tokens_per_s", None, streams].value > 0
