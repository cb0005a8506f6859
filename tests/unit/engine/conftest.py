"""Products in Triton's interpreter, in which a row's bits are its own, as on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="session")
def rows_multiplied_one_by_one() -> None:
    """On some processors NumPy's BLAS computes a row differently by where it lies in its block; `einsum` does not."""
    try:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    except ImportError:
        return

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        wide = d.data.dtype
        products = np.einsum("...mk,...kn->...mn", a.data.astype(wide), b.data.astype(wide))
        return TensorHandle(products + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
