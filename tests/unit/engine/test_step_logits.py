"""What is read of every row of a step, and numbers packed for one copy."""

from __future__ import annotations

import numpy as np
import torch

from specdec.engine.logits.step_logits import StepLogits
from specdec.engine.logits.transfer import to_host, unpacked


def test_the_likeliest_token_is_the_first_of_those_that_tie_and_a_nan_takes_the_law() -> None:
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
    assert read.likeliest_ids[:2] == [1, 2]
    assert read.is_finite == [True, True, False, False, False]
    part = read.select([1, 4])
    assert (len(part), part.num_tokens) == (2, 3)
    assert part.likeliest_ids == [2, 1]
    assert part.is_finite == [True, False]
    torch.testing.assert_close(part.values, rows[[1, 4]], rtol=0, atol=0, equal_nan=True)


def test_a_step_without_rows_is_read_too() -> None:
    assert StepLogits.read(torch.zeros(0, 7)).is_finite == []


def test_numbers_packed_for_one_copy_come_back_bit_by_bit() -> None:
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
