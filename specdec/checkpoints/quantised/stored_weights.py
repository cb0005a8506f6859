"""Find the tensors that make up each quantised weight of a checkpoint, and check that they fit together.

Names, dtypes and shapes in the headers of the files decide what a tensor is; the configuration must agree with them.
Layouts of the tensors:

- fp8 and int8 numbers: `weight` [outputs, inputs] in F8_E4M3 or I8, `weight_scale_inv` or `weight_scale` with one
  number, one a row, or one a block.
- pack-quantized: `weight_packed` I32, consecutive inputs from the lowest bits up, with 2 ** (bits - 1) added to each
  integer; `weight_scale`, `weight_shape`, and perhaps `weight_zero_point`, packed along the outputs.
- AWQ: `qweight` I32 [inputs, outputs / 8], `qzeros` [groups, outputs / 8], `scales` [groups, outputs].
- GPTQ: `qweight` I32 [inputs * bits / 32, outputs], `qzeros` [groups, outputs * bits / 32], `scales` [groups, outputs],
  and `g_idx` [inputs], the group of each input.
- MXFP4: `NAME_blocks` U8 [experts, outputs, inputs / 32, 16], `NAME_scales` U8 [experts, outputs, inputs / 32].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Never

from specdec.checkpoints.quantised.statement import WORD_BITS, NumberFormat, Quantisation
from specdec.checkpoints.weight_files import TensorHeader
from specdec.contract.errors import InvalidRequest

_WORD = 32
_AWQ_BITS = 4
#: Inputs of MXFP4 that share a scale, and bytes that hold them.
_MX_GROUP, _MX_BYTES = 32, 16
_NUMBERS = {"F8_E4M3": True, "I8": False}
_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
#: Ends of the names of tensors that only mean something together with a quantised weight.
_COMPANIONS = (
    ".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_g_idx", ".weight_scale", ".weight_scale_inv",
    ".weight_zero_point", ".weight_global_scale",
)  # fmt: skip


class Coding(Enum):
    """Layout of a weight's numbers in the files."""

    NUMBERS = "numbers"
    WORDS = "weight_packed"
    AWQ = "awq"
    GPTQ = "gptq"
    MXFP4 = "mxfp4"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The tensors of a quantised weight, by their names in the files."""

    coding: Coding
    shape: tuple[int, ...]
    """Shape of the parameter that it stands for."""
    bits: int
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    numbers: str
    scales: str
    zero_points: str | None = None
    column_groups: str | None = None
    """Tensor with the group of each column; None if groups are consecutive columns."""

    @property
    def tensors(self) -> tuple[str, ...]:
        parts = (self.numbers, self.scales, self.zero_points, self.column_groups)
        return tuple(part for part in parts if part is not None)


def stored_weights(
    model: str, quantisation: Quantisation, headers: Mapping[str, TensorHeader]
) -> dict[str, StoredWeight]:
    """Return the quantised weights of a checkpoint, by the names of the parameters that they stand for.

    Args:
        model: name of the checkpoint, as the user gave it.
        quantisation: what its configuration states.
        headers: all tensors of its files, by name.

    Raises:
        InvalidRequest: a tensor is missing, has another dtype or shape than its weight needs, is in a format that the
            configuration does not state, or belongs to no quantised weight.
    """
    finder = _Finder(model, quantisation, headers)
    found = dict(finder.weights())
    used = {tensor for weight in found.values() for tensor in weight.tensors}
    for name, weight in found.items():
        if name in headers and name != weight.numbers:
            finder.refuse(weight.numbers, f"stands for {name}, which is in the files as well")
    companions = _COMPANIONS + ((".scales",) if quantisation.method in ("awq", "gptq") else ())
    for name in headers:
        if name.endswith(companions) and name not in used:
            finder.refuse(name, "belongs to no quantised weight, so its meaning is not known")
    return found


def require_plain(model: str, headers: Mapping[str, TensorHeader]) -> None:
    """Check that a checkpoint whose configuration states no quantisation has no quantised weights.

    Raises:
        InvalidRequest: it has one. Its numbers would be taken for plain ones.
    """
    name = next((name for name in headers if name.endswith(_COMPANIONS)), None)
    if name is not None:
        raise InvalidRequest(
            f"model {model!r} has tensor {name} of a quantised weight in {headers[name].file.name}, and its "
            "config.json has no quantization_config: add it (of GPTQ it is the content of quantize_config.json, and "
            '"quant_method": "gptq")',
            field="model",
        )


class _Finder:
    def __init__(self, model: str, quantisation: Quantisation, headers: Mapping[str, TensorHeader]) -> None:
        self._model, self._quantisation, self._headers = model, quantisation, headers

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        """Yield each quantised weight with the name of its parameter."""
        for name, header in self._headers.items():
            base, _, end = name.rpartition(".")
            match self._quantisation.method:
                case "gptq" if end == "qweight":
                    yield f"{base}.weight", self._gptq(base)
                case "awq" if end == "qweight":
                    yield f"{base}.weight", self._awq(base)
                case "mxfp4" if end.endswith("_blocks"):
                    yield name.removesuffix("_blocks"), self._mxfp4(name.removesuffix("_blocks"))
                case "compressed-tensors" if end == "weight_packed":
                    yield f"{base}.weight", self._words(base)
                case "fp8" | "fbgemm_fp8" | "compressed-tensors" if _is_numbers(end, header):
                    yield name, self._numbers(name)

    def refuse(self, name: str, problem: str) -> Never:
        header = self._headers[name]
        raise InvalidRequest(
            f"model {self._model!r} is quantised with {self._quantisation.method}, and {header.file.name} does not fit "
            f"that: tensor {name} {header.dtype} {list(header.shape)} {problem}",
            field="model",
        )

    def _numbers(self, name: str) -> StoredWeight:
        header = self._headers[name]
        self._require_dtype(name, tuple(_NUMBERS))
        is_float = _NUMBERS[header.dtype]
        formats = self._formats(name, is_float=is_float, bits=8)
        scales = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in self._headers), None)
        if scales is None:
            self.refuse(name, f"has no scales: neither {name}_scale_inv nor {name}_scale is in the files")
        self._require_dtype(scales, _SCALES)
        block = self._block(scales, formats, header.shape)
        zero_points = self._companion(f"{name}_zero_point", formats, name)
        if zero_points is not None:
            self._require_shape(zero_points, self._headers[scales].shape)
        return StoredWeight(Coding.NUMBERS, header.shape, 8, block, name, scales, zero_points)

    def _words(self, base: str) -> StoredWeight:
        packed, scales, shape_name = (f"{base}.{end}" for end in ("weight_packed", "weight_scale", "weight_shape"))
        self._require_present(packed, scales, shape_name)
        self._require_dtype(packed, ("I32",))
        self._require_dtype(scales, ("F32", "BF16", "F16"))
        shape, held = self._integers(shape_name), self._headers[packed].shape
        if len(held) != 2 or held[0] != shape[0] or shape[1] < 1:
            self.refuse(packed, f"does not fit {shape_name}, which says {list(shape)}")
        rows, columns = shape
        bits = self._bits(packed, columns, held[1])
        formats = self._formats(packed, is_float=False, bits=bits)
        block = self._block(scales, formats, shape)
        zero_points = self._companion(f"{base}.weight_zero_point", formats, packed)
        if zero_points is not None:
            self._require_dtype(zero_points, ("I32",))
            self._require_shape(zero_points, (-(-rows * bits // _WORD), -(-columns // block[1])))
        groups = self._column_groups(f"{base}.weight_g_idx", columns)
        return StoredWeight(Coding.WORDS, shape, bits, block, packed, scales, zero_points, groups)

    def _awq(self, base: str) -> StoredWeight:
        numbers, zero_points, scales = (f"{base}.{end}" for end in ("qweight", "qzeros", "scales"))
        self._require_integers_with_scales(numbers, zero_points, scales)
        columns, words = self._headers[numbers].shape
        rows = words * _WORD // _AWQ_BITS
        (format_,) = self._formats(numbers, is_float=False, bits=_AWQ_BITS)
        groups = self._groups(numbers, columns, format_)
        self._require_shape(scales, (groups, rows))
        self._require_shape(zero_points, (groups, words))
        block = (1, columns // groups)
        return StoredWeight(Coding.AWQ, (rows, columns), _AWQ_BITS, block, numbers, scales, zero_points)

    def _gptq(self, base: str) -> StoredWeight:
        numbers, zero_points, scales = (f"{base}.{end}" for end in ("qweight", "qzeros", "scales"))
        self._require_integers_with_scales(numbers, zero_points, scales)
        words, rows = self._headers[numbers].shape
        num_groups, zero_words = self._headers[zero_points].shape
        bits = self._bits(zero_points, rows, zero_words)
        columns = words * _WORD // bits
        groups = self._column_groups(f"{base}.g_idx", columns)
        if groups is None:
            num_groups = self._groups(numbers, columns, self._formats(numbers, is_float=False, bits=bits)[0])
        self._require_shape(scales, (num_groups, rows))
        self._require_shape(zero_points, (num_groups, zero_words))
        block = (1, -(-columns // num_groups))
        return StoredWeight(Coding.GPTQ, (rows, columns), bits, block, numbers, scales, zero_points, groups)

    def _mxfp4(self, name: str) -> StoredWeight:
        numbers, scales = f"{name}_blocks", f"{name}_scales"
        self._require_present(numbers, scales)
        self._require_dtype(numbers, ("U8",))
        self._require_dtype(scales, ("U8",))
        shape = self._headers[numbers].shape
        if len(shape) != 4 or shape[-1] != _MX_BYTES:
            self.refuse(numbers, f"must have the shape [experts, outputs, groups, {_MX_BYTES}]")
        self._require_shape(scales, shape[:-1])
        experts, rows, groups, _ = shape
        # The parameter has the inputs of each expert in its rows.
        return StoredWeight(Coding.MXFP4, (experts, groups * _MX_GROUP, rows), 4, (1, _MX_GROUP), numbers, scales)

    def _formats(self, name: str, *, is_float: bool, bits: int) -> tuple[NumberFormat, ...]:
        """Return the stated formats of numbers of one kind. Refuse a tensor of a kind that is not stated."""
        stated = self._quantisation.formats
        formats = tuple(each for each in stated if each.is_float == is_float and each.bits == bits)
        if not formats:
            known = " or ".join(sorted({f"{'fp' if each.is_float else 'int'}{each.bits}" for each in stated}))
            self.refuse(name, f"holds {'fp' if is_float else 'int'}{bits}; its config.json states {known or 'nothing'}")
        return formats

    def _block(self, scales: str, formats: tuple[NumberFormat, ...], shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns that share one of the scales."""
        *experts, rows, columns = shape
        held = self._headers[scales].shape
        stated = [each.block for each in formats if each.block is not None]
        choices = [((rows, columns), end) for end in ((), (1,), (1, 1))]
        choices += [((1, columns), (rows,)), ((1, columns), (rows, 1))]
        choices += [(block, (-(-rows // block[0]), -(-columns // block[1]))) for block in stated]
        block = next((block for block, grid in choices if held in (grid, (*experts, *grid))), None)
        if block is None:
            shapes = " or ".join(dict.fromkeys(str([*experts, *grid]) for _, grid in choices[2:]))
            self.refuse(scales, f"does not fit a weight of shape {list(shape)}, which needs {shapes}")
        return block

    def _bits(self, name: str, num_integers: int, num_words: int) -> int:
        """Return the bits of each of a row's integers, of which a tensor has a number of words."""
        widths = {bits: -(-num_integers * bits // _WORD) for bits in WORD_BITS}
        found = next((bits for bits, width in widths.items() if width == num_words), None)
        if found is None:
            needed = " or ".join(f"{width} words with {bits} bits" for bits, width in widths.items())
            self.refuse(name, f"does not fit its weight: a row of {num_integers} integers has {needed}")
        return found

    def _column_groups(self, name: str, columns: int) -> str | None:
        """Return the name of the tensor with the group of each column, if there is one."""
        if name not in self._headers:
            return None
        self._require_dtype(name, ("I32", "I64"))
        self._require_shape(name, (columns,))
        return name

    def _groups(self, numbers: str, columns: int, format_: NumberFormat) -> int:
        """Return the number of groups of consecutive columns."""
        size = columns if format_.block is None else format_.block[1]
        if columns % size:
            self.refuse(numbers, f"has {columns} inputs, which groups of {size} (group_size) do not divide")
        return columns // size

    def _companion(self, name: str, formats: tuple[NumberFormat, ...], weight: str) -> str | None:
        """Return the name of the zero points, or None if the weight has none and needs none."""
        if name in self._headers:
            return name
        if all(each.has_zero_points for each in formats):
            self.refuse(weight, f"needs zero points, because its config.json says symmetric: false: {name} is missing")
        return None

    def _require_integers_with_scales(self, numbers: str, zero_points: str, scales: str) -> None:
        self._require_present(numbers, zero_points, scales)
        for name, dtypes in ((numbers, ("I32",)), (zero_points, ("I32",)), (scales, ("F32", "BF16", "F16"))):
            self._require_dtype(name, dtypes)
            if len(self._headers[name].shape) != 2:
                self.refuse(name, "must have two dimensions")

    def _require_present(self, name: str, *others: str) -> None:
        for other in others:
            if other not in self._headers:
                self.refuse(name, f"needs {other}, which is in none of the files")

    def _require_dtype(self, name: str, dtypes: tuple[str, ...]) -> None:
        if self._headers[name].dtype not in dtypes:
            self.refuse(name, f"must be {' or '.join(dtypes)}")
        if 0 in self._headers[name].shape:
            self.refuse(name, "is empty")

    def _require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if self._headers[name].shape != shape:
            self.refuse(name, f"must have the shape {list(shape)} to fit its weight and group_size")

    def _integers(self, name: str) -> tuple[int, ...]:
        """Return the numbers of a small tensor."""
        self._require_dtype(name, ("I64", "I32"))
        header = self._headers[name]
        if header.shape != (2,):
            self.refuse(name, "must hold two numbers")
        size = 8 if header.dtype == "I64" else 4
        with header.file.open("rb") as file:
            file.seek(header.start)
            numbers = file.read(2 * size)
        return tuple(int.from_bytes(numbers[at : at + size], "little", signed=True) for at in (0, size))


def _is_numbers(end: str, header: TensorHeader) -> bool:
    """Return whether a tensor holds numbers of eight bits that are not scales or zero points."""
    is_companion = end.endswith(("_scale", "_scale_inv", "_zero_point"))
    return header.dtype in ("I8", "F8_E4M3", "F8_E5M2") and len(header.shape) > 1 and not is_companion
