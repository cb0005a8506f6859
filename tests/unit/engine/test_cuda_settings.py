"""What a process that loads a model has told PyTorch; the settings exist without a device too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from tests.support.tiny_models import build_tiny_model


@pytest.fixture
def as_pytorch_comes() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True


@pytest.mark.usefixtures("as_pytorch_comes")
def test_a_loaded_model_attends_without_cudnn_and_adds_up_in_full_precision(tmp_path: Path) -> None:
    load_worker(LoadRequest(str(build_tiny_model("llama", tmp_path)), device="cpu", dtype="float32", num_kv_blocks=8))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
