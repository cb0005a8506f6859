"""The argmax and finiteness of every row of a step, and packing of numbers for one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.engine.kernels.library import load_library
from specdec.engine.logits import kernel_choices
from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.logits.transfer import to_host, unpacked


@pytest.fixture(params=["kernels", "numpy"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the implementation that reads rows on the host."""
    library = load_library(None) if request.param == "kernels" else None
    monkeypatch.setattr(kernel_choices, "loaded_library", lambda: library)
    return str(request.param)


@pytest.mark.usefixtures("reader")
def test_the_argmax_is_the_first_of_equal_logits_and_a_nan_leaves_a_row_without_distribution() -> None:
    rows = torch.tensor(
        [
            [1.0, 5.0, 5.0],
            [-torch.inf, -torch.inf, -3.0],
            [-torch.inf, -torch.inf, -torch.inf],
            [1.0, torch.inf, 0.0],
            [9.0, torch.nan, 10.0],
        ]
    )
    read = StepLogits.read(rows)
    assert read.top_ids[:2] == [1, 2]
    assert read.is_finite == [True, True, False, False, False]
    part = read.select([1, 4])
    assert (len(part), part.num_tokens) == (2, 3)
    assert part.top_ids == [2, 1]
    assert part.is_finite == [True, False]
    torch.testing.assert_close(part.values, rows[[1, 4]], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 255, 256, 257, 1000])
def test_either_reader_agrees_with_numpys_argmax(num_tokens: int, reader: str) -> None:
    generator = np.random.default_rng(num_tokens)
    rows = np.round(generator.standard_normal((200, num_tokens)).astype(np.float32), 1)  # many are equal
    rows[1::4] -= 50.0
    rows[2::8, generator.integers(num_tokens)] = np.inf
    rows[3::8, generator.integers(num_tokens)] = np.nan
    rows[4::16] = -np.inf
    padded = np.full((200, num_tokens + 3), 1e9, dtype=np.float32)  # only a part of each row is read
    padded[:, :num_tokens] = rows
    read = StepLogits.read(torch.from_numpy(padded)[:, :num_tokens])
    assert read.top_ids == rows.argmax(axis=-1).tolist()
    assert read.is_finite == np.isfinite(rows[np.arange(200), rows.argmax(axis=-1)]).tolist()
    assert (kernel_choices.argmax(read.values) is None) == (reader == "numpy")


@pytest.mark.usefixtures("reader")
def test_a_step_may_have_no_rows() -> None:
    assert StepLogits.read(torch.zeros(0, 7)).is_finite == []


def test_numbers_packed_for_one_copy_keep_their_bits() -> None:
    generator = np.random.default_rng(3)
    sent = [
        torch.from_numpy(generator.standard_normal((3, 4)).astype(np.float32)),
        torch.from_numpy(generator.standard_normal(5)),
        torch.from_numpy(generator.integers(0, 2**53, (2, 2))),
        torch.tensor([torch.inf, -torch.inf, 1e-45], dtype=torch.float32),
        torch.zeros(0, 3, dtype=torch.int64),
    ]
    packed = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in sent])
    for arrays in (unpacked(packed, sent), to_host(*sent)):
        for array, tensor in zip(arrays, sent, strict=True):
            assert array.dtype == tensor.numpy().dtype
            np.testing.assert_array_equal(array, tensor.numpy())
