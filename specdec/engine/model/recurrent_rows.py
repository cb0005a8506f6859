"""Rows of one sequence through a recurrence, one after the other: the gated delta rule and the scan of Mamba 2.

A row has the same bits however the rows of its sequence are grouped into steps. The C++ kernels
(`kernels/recurrence.h`) do it in processes that have loaded them; PyTorch's operations need a dozen calls a row. Called
by `engine.model.recurrence`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.engine.kernels.library import loaded_library

Saves = Sequence[tuple[int, torch.Tensor]]
"""Numbers of rows, ascending, with the tensors that receive the state after them."""


@dataclass(frozen=True, slots=True)
class Rows:
    """float32 rows of one sequence. `groups` is a divisor of `heads`: adjacent heads share a row of a group."""

    decay: torch.Tensor
    """[rows, heads]: factors of the state."""
    gate: torch.Tensor
    """[rows, heads]: share of the change that a row makes (delta rule), or the length of its step (scan)."""
    values: torch.Tensor
    """[rows, heads, width] of the delta rule, [rows, heads, height] of the scan, for states [heads, height, width]."""
    write: torch.Tensor
    """[rows, groups, height] of the delta rule, [rows, groups, width] of the scan."""
    read: torch.Tensor
    """Rows that read the state, shaped as `write`."""


def delta_rule(rows: Rows, source: torch.Tensor | None, shape: torch.Size, saves: Saves) -> torch.Tensor:
    """Run rows through the gated delta rule.

    Args:
        rows: the rows.
        source: state before them; None: zeros.
        shape: [heads, height, width] of a state.
        saves: where states go; a tensor may be `source`.

    Returns:
        float32 [rows, heads, width].
    """
    output = _by_kernels("specdec_delta_rows", rows, source, shape, saves)
    return _by_pytorch(_delta_row, rows, source, shape, saves) if output is None else output


def scan(rows: Rows, source: torch.Tensor | None, shape: torch.Size, saves: Saves) -> torch.Tensor:
    """Run rows through the scan of Mamba 2; as `delta_rule`, but it returns float32 [rows, heads, height]."""
    output = _by_kernels("specdec_scan_rows", rows, source, shape, saves)
    return _by_pytorch(_scan_row, rows, source, shape, saves) if output is None else output


class _Rows(ctypes.Structure):
    """`RecurrentRows` of `kernels/recurrence.h`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "heads", "height", "width", "groups")),
        *((name, ctypes.c_void_p) for name in ("source", "work", "saves", "saved")),
        ("num_saves", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("decay", "gate", "values", "write", "read", "output")),
    )


def _by_kernels(
    name: str, rows: Rows, source: torch.Tensor | None, shape: torch.Size, saves: Saves
) -> torch.Tensor | None:
    """Return the output; None if this process has no kernels for these rows."""
    library = loaded_library()
    if library is None or rows.values.device.type != "cpu":
        return None
    source = None if source is None else source.contiguous()
    tensors = [tensor.contiguous() for tensor in (rows.decay, rows.gate, rows.values, rows.write, rows.read)]
    output, work = torch.empty_like(tensors[2]), torch.empty(shape)
    numbers = (ctypes.c_int64 * len(saves))(*(num_rows for num_rows, _ in saves))
    saved = (ctypes.c_void_p * len(saves))(*(state.data_ptr() for _, state in saves))
    laid_out = _Rows(
        len(output), *shape, rows.write.shape[1], None if source is None else source.data_ptr(), work.data_ptr(),
        ctypes.addressof(numbers), ctypes.addressof(saved), len(saves), *(tensor.data_ptr() for tensor in tensors),
        output.data_ptr(),
    )  # fmt: skip
    return output if getattr(library, name)(ctypes.byref(laid_out), torch.get_num_threads()) else None


def _by_pytorch(
    run: Callable[[torch.Tensor, Rows, int, int], torch.Tensor],
    rows: Rows,
    source: torch.Tensor | None,
    shape: torch.Size,
    saves: Saves,
) -> torch.Tensor:
    state = rows.values.new_zeros(shape) if source is None else source.clone()
    outputs, repeats = torch.empty_like(rows.values), shape[0] // rows.write.shape[1]
    for row in range(len(outputs)):
        outputs[row] = run(state, rows, row, repeats)
        for num_rows, saved in saves:
            if num_rows == row + 1:
                saved.copy_(state)
    return outputs


def _delta_row(state: torch.Tensor, rows: Rows, row: int, repeats: int) -> torch.Tensor:
    """Run one row, changing the state [heads, height, width]; return [heads, width]."""
    write, read = (each[row].repeat_interleave(repeats, dim=0).unsqueeze(-1) for each in (rows.write, rows.read))
    state *= rows.decay[row, :, None, None]
    change = (rows.values[row] - (state * write).sum(dim=1)) * rows.gate[row].unsqueeze(-1)
    state += write * change.unsqueeze(1)
    return (state * read).sum(dim=1)


def _scan_row(state: torch.Tensor, rows: Rows, row: int, repeats: int) -> torch.Tensor:
    """Run one row, changing the state [heads, height, width]; return [heads, height]."""
    write, read = (each[row].repeat_interleave(repeats, dim=0).unsqueeze(1) for each in (rows.write, rows.read))
    state *= rows.decay[row, :, None, None]
    state += (rows.values[row] * rows.gate[row].unsqueeze(-1)).unsqueeze(-1) * write
    return (state * read).sum(dim=-1)
