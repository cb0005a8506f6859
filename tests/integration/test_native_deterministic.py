"""`--deterministic` on a CPU: kept by the native kernels, checked at start, and refused for other backends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.contract.errors import Unsupported
from specdec.engine.base import StepPlan
from specdec.engine.loader import load_worker
from specdec.engine.native.native_runner import NativeRunner
from specdec.engine.options import CompileOptions, LoadRequest
from tests.support.tiny_models import build_tiny_model

VOCABULARY_SIZE = 96


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_check_at_start_accepts_a_deterministic_worker_and_refuses_another(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are deterministic; the negative control is a worker that is not."""
    build_tiny_model("llama", tmp_path, vocabulary_size=VOCABULARY_SIZE, context=256)
    compiling = CompileOptions(is_deterministic=True)
    options = {"device": "cpu", "dtype": dtype, "num_kv_blocks": 16, "self_check": False}
    load_worker(LoadRequest(str(tmp_path), compiling=compiling, **options))
    execute = NativeRunner.execute

    def crowded(self: NativeRunner, plan: StepPlan) -> torch.Tensor:
        return execute(self, plan) * (1 + 2**-20 * len(plan.slices))

    monkeypatch.setattr(NativeRunner, "execute", crowded)
    with pytest.raises(Unsupported, match="--deterministic is not possible with this model on this device"):
        load_worker(LoadRequest(str(tmp_path), compiling=compiling, **options))


@pytest.mark.parametrize(("architecture", "dtype"), [("gpt2", "float32"), ("llama", "bfloat16")])
def test_models_that_the_kernels_do_not_support_are_not_deterministic(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    build_tiny_model(architecture, tmp_path, vocabulary_size=VOCABULARY_SIZE, context=256)
    with pytest.raises(Unsupported, match="on cpu needs native kernels, which do not run this model") as refusal:
        load_worker(
            LoadRequest(
                str(tmp_path),
                device="cpu",
                dtype=dtype,
                num_kv_blocks=16,
                compiling=CompileOptions(is_deterministic=True),
            )
        )
    assert refusal.value.field == "deterministic"
