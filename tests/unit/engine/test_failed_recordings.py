"""A failed recording raises its cause, although PyTorch's end of the recording fails too with another message."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from specdec.engine.cuda_graphs.capture import CudaCapture

UNRECORDABLE = "Cannot copy between CPU and CUDA tensors during CUDA graph capture"


class _Stream:
    def wait_stream(self, stream: object) -> None: ...


class _EndsBadly(contextlib.nullcontext[None]):
    """Like `torch.cuda.graph`, it ends the recording first, even after a failure."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __exit__(self, *_: Any) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_a_failed_recording_raises_the_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: _Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: _Stream())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", _EndsBadly)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)
    runs = 0

    def step() -> None:
        nonlocal runs
        runs += 1
        if runs > 2:  # the warm-up runs are not recorded
            raise RuntimeError(UNRECORDABLE)

    with pytest.raises(RuntimeError, match=UNRECORDABLE):
        CudaCapture(torch.device("cpu"))(step)
    assert runs == 3
