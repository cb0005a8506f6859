"""Linear layers by the row kernel in Triton's interpreter: right results, and the same bits of a row in any batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.engine.linear import row_products
from specdec.engine.linear.int8 import Int8Weight, round_to_int8
from specdec.engine.linear.row_products import RowProjection, multiply, tiling

pytest.importorskip("triton", reason="Triton is not installed here: its kernels were not interpreted")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled on this machine: see tests/gpu"
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Each with its own number of tiles; beyond 16 and 64 rows tiles have other sizes.
COUNTS = (*range(1, 10), 17, 33, 65, 70)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(is_int8: bool, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor | Int8Weight:
    weight = random(num_outputs, num_inputs, seed=1, dtype=dtype)
    return round_to_int8(weight) if is_int8 else weight


def exact(weight: torch.Tensor | Int8Weight) -> torch.Tensor:
    return (weight.rounded() if isinstance(weight, Int8Weight) else weight).double()


@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"), [(1, 40, 64), (5, 7, 300), (20, 33, 17), (66, 70, 129)]
)
def test_products_of_any_size_equal_those_of_pytorch(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, is_int8: bool
) -> None:
    """The reference is float64 with the rounded weight, so only the sum and its one rounding differ."""
    weight = weight_of(is_int8, num_outputs, num_inputs, dtype)
    x = random(num_rows, num_inputs, seed=2, dtype=dtype)
    bias, residual = random(num_outputs, seed=3, dtype=dtype), random(num_rows, num_outputs, seed=4, dtype=dtype)
    product = x.double() @ exact(weight).t()
    projection = RowProjection(weight, bias)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(projection(x).double(), product + bias, rtol=rounding, atol=1e-4)
    torch.testing.assert_close(
        projection.add_to(residual, x).double(), residual + product + bias, rtol=rounding, atol=1e-4
    )
    wide = multiply(x, weight, output_dtype=torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), product, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "is_int8"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)],
)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, is_int8: bool) -> None:
    weight = weight_of(is_int8, 20, 160, dtype)
    rows, residual = random(max(COUNTS), 160, seed=5, dtype=dtype), random(max(COUNTS), 20, seed=6, dtype=dtype)
    each = zip(rows.split(1), residual.split(1), strict=True)
    alone = torch.cat([multiply(row, weight, residual=kept) for row, kept in each])
    for count in COUNTS:
        own = slice(len(rows) - count, len(rows))  # so that each row has another index every time
        assert torch.equal(multiply(rows[own], weight, residual=residual[own]), alone[own]), count


def test_tiles_of_another_depth_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a product that sums in another order if it has more rows."""

    def deeper(num_rows: int, dtype: torch.dtype) -> row_products.Tiling:
        return replace(tiling(num_rows, dtype), inputs=64 if num_rows > 16 else 128)

    monkeypatch.setattr(row_products, "tiling", deeper)
    weight, rows = random(40, 300, seed=1), random(17, 300, seed=5)
    assert not torch.equal(multiply(rows, weight)[:1], multiply(rows[:1], weight))


def test_nan_in_one_row_does_not_reach_other_rows() -> None:
    rows = random(5, 64, seed=7)
    rows[2] = torch.nan
    product = multiply(rows, random(8, 64, seed=1))
    assert product[2].isnan().all()
    assert product[[0, 1, 3, 4]].isfinite().all()


def test_strided_rows_are_read_in_place_and_zero_rows_give_zero_rows() -> None:
    wide, weight = random(4, 200, seed=8), random(8, 64, seed=1)
    assert torch.equal(multiply(wide[:, 100:164], weight), multiply(wide[:, 100:164].contiguous(), weight))
    assert torch.equal(multiply(wide.t()[:64].t(), weight), multiply(wide[:, :64].contiguous(), weight))
    assert multiply(wide[:0, :64], weight).shape == (0, 8)


def test_tiles_have_the_same_depth_for_any_number_of_rows() -> None:
    for dtype in DTYPES:
        assert len({tiling(num_rows, dtype).inputs for num_rows in (1, 16, 17, 64, 65, 4096)}) == 1


def test_the_kernel_compiles_for_a_hopper_card(tmp_path: Path) -> None:
    """Every tiling uses the same tensor-core instruction and loads weights ahead."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    report = subprocess.run(
        [sys.executable, "-m", "tests.support.kernel_compilation", "products"],
        cwd=Path(__file__).parents[3], env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    kernels = json.loads(report.stdout)
    assert len(kernels) == 6
    for kernel in kernels.values():
        assert kernel["shared_bytes"] <= 100_000  # two programs and more to a processor
        assert kernel["products"] == ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"]
        assert kernel["copies_ahead"]
        assert kernel["stack_bytes"] == 0
