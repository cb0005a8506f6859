"""Offer the weights of a published quantised checkpoint to transformers as the plain numbers that they stand for.

A weight is (integer - zero point) * scale, computed in float32 and rounded once; with scales of 16 bits it is exact.
Activations are never rounded. A weight is read and computed when transformers asks for it, so that no second copy of
the model is held. `specdec.checkpoints.quantised` finds the tensors. Called by `checkpoint_model`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Never, Self

import torch
from safetensors import safe_open

from specdec.checkpoints.quantised.statement import Quantisation
from specdec.checkpoints.quantised.stored_weights import Coding, StoredWeight, stored_weights
from specdec.checkpoints.weight_files import tensor_headers
from specdec.contract.errors import InvalidRequest

_log = logging.getLogger(__name__)

#: Place, from the lowest bits up, of each of eight consecutive integers in a word of AWQ.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
#: The numbers of four bits (E2M1) of MXFP4, by their bits.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_Read = Callable[[str], torch.Tensor]


class QuantisedReader:
    """The weights of one checkpoint, whose files are open until the end of the `with` block."""

    def __init__(self, model: str, directory: Path, quantisation: Quantisation, *, text_only: bool = False) -> None:
        """
        Args:
            model: name that the user gave.
            directory: directory of the checkpoint.
            quantisation: what its configuration states.
            text_only: only the text half is loaded; see `tensor_headers`.

        Raises:
            InvalidRequest: as `tensor_headers` and `stored_weights`; or a file is cut short, or a zero point or a group
                is out of range.
        """
        headers = tensor_headers(model, directory, text_only=text_only)
        self._model, self._shift = model, quantisation.zero_point_shift
        self._weights = stored_weights(model, quantisation, headers)
        with ExitStack() as opened:
            try:
                paths = {header.file for header in headers.values()}
                files = {path: opened.enter_context(safe_open(path, framework="pt")) for path in paths}
            except Exception as error:  # safetensors raises many kinds of errors
                raise InvalidRequest(f"model {model!r} cannot be loaded: {error}", field="model") from error
            self._file_of = {name: files[header.file] for name, header in headers.items()}
            for weight in self._weights.values():
                self._require_sound(weight)
            self._open_files = opened.pop_all()
        if quantisation.rounded_activations:
            _log.warning(
                "the configuration of %s says that activations are rounded to %s; they are not rounded here",
                model, quantisation.rounded_activations,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()

    def parts(self) -> dict[str, Any]:
        """Return every tensor of the plain checkpoint by name, to be read when it is indexed."""
        consumed = {tensor for weight in self._weights.values() for tensor in weight.tensors}
        plain = {name: file.get_slice(name) for name, file in self._file_of.items() if name not in consumed}
        parts: dict[str, Any] = {name: _Part(stored) for name, stored in plain.items()}
        return parts | {name: _QuantisedPart(weight, self) for name, weight in self._weights.items()}

    def weight(self, stored: StoredWeight) -> torch.Tensor:
        return dequantise(stored, self._read, self._shift)

    def _read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def _require_sound(self, weight: StoredWeight) -> None:
        """Check the numbers that select others."""
        if weight.column_groups is not None:
            groups = self._read(weight.column_groups)
            shape = self._file_of[weight.scales].get_slice(weight.scales).get_shape()
            num_groups = shape[0 if weight.coding is Coding.GPTQ else -1]
            if not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
                self._refuse(
                    weight.column_groups,
                    f"names groups {int(groups.min())} to {int(groups.max())}, and there are {num_groups}",
                )
        if self._shift and weight.zero_points is not None:
            most = (1 << weight.bits) - self._shift
            if int(unpacked(self._read(weight.zero_points), weight.bits).max()) >= most:
                self._refuse(
                    weight.zero_points,
                    f"holds the zero point {most}, which readers of checkpoint_format gptq understand differently; "
                    "write the checkpoint as gptq_v2",
                )

    def _refuse(self, tensor: str, problem: str) -> Never:
        raise InvalidRequest(f"model {self._model!r} cannot be loaded: tensor {tensor} {problem}", field="model")


class _Part:
    """A tensor that is stored as it is, with the operations that transformers uses on a tensor that it is to load."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._stored[:0].dtype if self._stored.get_shape() else self._stored[...].dtype
        return dtype

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, everything: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._stored[everything]
        return tensor


class _QuantisedPart:
    """A quantised weight as a tensor that transformers is to load."""

    dtype = torch.float32

    def __init__(self, weight: StoredWeight, reader: QuantisedReader) -> None:
        self._weight, self._reader = weight, reader

    def is_floating_point(self) -> bool:
        return True

    def __getitem__(self, everything: Any) -> torch.Tensor:
        return self._reader.weight(self._weight)[everything]


def dequantise(weight: StoredWeight, read: _Read, zero_point_shift: int = 0) -> torch.Tensor:
    """Return the numbers of a weight in the shape of its parameter: float32, of MXFP4 bfloat16, which holds it exactly.

    Args:
        weight: the weight.
        read: returns a stored tensor by name.
        zero_point_shift: number to add to each stored zero point.
    """
    if weight.coding is Coding.MXFP4:
        return _mxfp4(weight, read)
    numbers, scales, zero_points = _READERS[weight.coding](weight, read)
    rows, columns = weight.shape[-2:]
    result = numbers.contiguous().view(-1, rows, columns).float()
    groups = None if weight.column_groups is None else read(weight.column_groups).long()
    if zero_points is not None:
        result -= _widened(zero_points.float() + zero_point_shift, weight, groups)
    result *= _widened(scales.float(), weight, groups)
    return result.reshape(weight.shape)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers of `bits` bits of words [..., N], from the lowest bits up: uint8 [..., N * 32 / bits]."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((octets.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


#: Numbers [rows, columns], scales and zero points [rows, groups], of which a row or a column may stand for several.
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _numbers(weight: StoredWeight, read: _Read) -> _Parts:
    scales = read(weight.scales)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return read(weight.numbers), scales, None if weight.zero_points is None else read(weight.zero_points)


def _words(weight: StoredWeight, read: _Read) -> _Parts:
    rows, columns = weight.shape
    zero_points = torch.full((1, 1), 1 << (weight.bits - 1))
    if weight.zero_points is not None:
        zero_points = unpacked(read(weight.zero_points).T, weight.bits)[:, :rows].T
    return unpacked(read(weight.numbers), weight.bits)[:, :columns], read(weight.scales), zero_points


def _awq(weight: StoredWeight, read: _Read) -> _Parts:
    numbers, zero_points = (
        unpacked(read(name), weight.bits).unflatten(-1, (-1, len(_AWQ_ORDER)))[..., _AWQ_ORDER].flatten(-2).T
        for name in (weight.numbers, str(weight.zero_points))
    )
    return numbers, read(weight.scales).T, zero_points


def _gptq(weight: StoredWeight, read: _Read) -> _Parts:
    zero_points = unpacked(read(str(weight.zero_points)), weight.bits)[:, : weight.shape[0]].T
    return unpacked(read(weight.numbers).T, weight.bits), read(weight.scales).T, zero_points


_READERS: Mapping[Coding, Callable[[StoredWeight, _Read], _Parts]] = {
    Coding.NUMBERS: _numbers,
    Coding.WORDS: _words,
    Coding.AWQ: _awq,
    Coding.GPTQ: _gptq,
}


def _widened(shared: torch.Tensor, weight: StoredWeight, groups: torch.Tensor | None) -> torch.Tensor:
    """Return numbers that parts of a weight share in a shape that spreads over [experts, rows, columns].

    Args:
        shared: one number for the whole weight or for each block.
        weight: the weight.
        groups: group of each column; None if groups are consecutive columns.
    """
    (rows, columns), (block_rows, block_columns) = weight.shape[-2:], weight.block
    if shared.numel() == 1:
        return shared.reshape(1, 1, 1)
    if groups is not None:
        return shared.index_select(-1, groups).unsqueeze(0)
    shared = shared.reshape(-1, -(-rows // block_rows), -(-columns // block_columns))
    if shared.shape[-1] > 1:
        shared = shared.repeat_interleave(block_columns, -1)[..., :columns]
    return shared.repeat_interleave(block_rows, -2)[..., :rows, :] if 1 < block_rows < rows else shared


def _mxfp4(weight: StoredWeight, read: _Read) -> torch.Tensor:
    halves = unpacked(torch.arange(256, dtype=torch.uint8), 4).view(256, 2).int()
    pairs = torch.tensor(_E2M1, dtype=torch.bfloat16)[halves]  # the two numbers of each byte
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    # One expert at a time: indices take several times the memory of the result.
    for expert, (block, exponents) in enumerate(zip(read(weight.numbers), read(weight.scales), strict=True)):
        scales = exponents.view(torch.float8_e8m0fnu).to(torch.bfloat16)
        result[expert] = (pairs[block.int()].flatten(-2) * scales.unsqueeze(-1)).flatten(-2).T
    return result
