"""State the rotary embedding of a GGUF file's model as transformers' configurations do, or refuse it by its key.

llama.cpp stores Llama 3's scaling as the resulting divisor of each frequency; its parameters are recovered from those.
The divisors of LongRoPE are taken as they are. Called by `specdec.checkpoints.gguf.architectures`.

Source: llama.cpp, `llama_model_base::load_hparams` and `llama_context::llama_context`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.checkpoints.gguf.file import GgufFile
from specdec.checkpoints.gguf.numbers import ModelNumbers
from specdec.contract.errors import InvalidRequest, Unsupported

#: Divisors of the frequencies: of Llama 3's scaling, and of LongRoPE's in long and short sequences.
DIVISORS, LONG_DIVISORS, SHORT_DIVISORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"

#: Parameters of every Llama since 3.1. Their factors differ (8 and 32), so the factor is taken from the file.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192
#: Relative tolerance of a comparison of numbers that are stored as float32.
_TOLERANCE = 1e-5

_DEFAULT_BASE = 10_000.0
_F32 = 0
#: Least divisor of a frequency that is not rotated.
_NOT_ROTATED = 1e29


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of an architecture."""

    is_partial: bool = False
    """True if a part of each head may be rotated."""
    reads_divisors: bool = False
    """True if a file may hold the tensor `DIVISORS`."""
    is_long: bool = False
    """True if a file may hold the tensors of LongRoPE."""
    has_local: bool = False
    """True if layers that attend within a window have a rotary embedding without the scaling of the others."""
    local_base: float | None = None
    """Base of those layers if the file does not state it; None: the base of the others."""
    yarn: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of YaRN that the architecture implies."""
    has_temperature: bool = False
    """True if attention is scaled by the position, as in Ministral 3."""
    is_proportional: bool = False
    """True if the tensor `DIVISORS` says which part of each head is rotated, as in Gemma 4."""
    is_switchable: bool = False
    """True if a file may say that nothing is rotated, as in Granite."""


def rope_fields(file: GgufFile, numbers: ModelNumbers, rope: Rope, head_dim: int, context: int) -> dict[str, Any]:
    """Return the fields of the configuration that describe the rotary embedding.

    Args:
        file: the file, whose tensors of divisors are read.
        numbers: numbers of the file; those of the rotary embedding are used.
        rope: the architecture's.
        head_dim: width of a head.
        context: longest sequence of the model.

    Raises:
        InvalidRequest: a value is impossible.
        Unsupported: transformers' configuration cannot state the embedding.
    """
    width = head_dim
    if rope.is_partial:
        width = numbers.count("rope.dimension_count", head_dim, most=head_dim)
    else:
        numbers.require("rope.dimension_count", head_dim)
    numbers.require("rope.dimension_count_swa", width)
    base = _real_from_zero(numbers, "rope.freq_base", _DEFAULT_BASE)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if rope.is_partial:
        parameters["partial_rotary_factor"] = _share(width, head_dim)
    parameters |= _Scaling(file, numbers, rope, width // 2, context).parameters()
    if rope.is_proportional:
        parameters |= _proportional(file)
    if rope.has_temperature:
        parameters["llama_4_scaling_beta"] = float(numbers.real("attention.temperature_scale"))
    if rope.has_local:
        local_base = _real_from_zero(numbers, "rope.freq_base_swa", rope.local_base or base)
        local = {"rope_type": "default", "rope_theta": local_base}
        return {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}}
    numbers.require("rope.freq_base_swa", base)
    original = parameters.get("original_max_position_embeddings") if rope.is_long else None
    return {"rope_parameters": parameters} | (
        {} if original is None else {"original_max_position_embeddings": original}
    )


def _real_from_zero(numbers: ModelNumbers, key: str, default: float) -> float:
    """Return a number that must not be negative."""
    value = float(numbers.real(key, default))
    if value < 0:
        numbers.refuse(key, value)
    return value


def _proportional(file: GgufFile) -> dict[str, Any]:
    """Return the parameters of an embedding that does not rotate frequencies with a very large divisor."""
    num_frequencies = file.tensors[DIVISORS].shape[0] if DIVISORS in file.tensors else 0
    divisors = _floats(file, DIVISORS, num_frequencies)
    num_rotated = int(np.count_nonzero(divisors == 1))
    if num_rotated == 0 or not np.all(divisors[num_rotated:] >= _NOT_ROTATED):
        raise Unsupported(
            f"model {str(file.path)!r} uses an unsupported RoPE scaling: its tensor {DIVISORS} has another form than "
            "Gemma 4's; serve it with --backend llama-cpp",
            field="model",
        )
    return {"rope_type": "proportional", "partial_rotary_factor": _share(2 * num_rotated, 2 * num_frequencies)}


def _share(width: int, head_dim: int) -> float:
    """Return the share of a head that is rotated, such that rounding down its product gives the width."""
    share = width / head_dim
    return share if int(head_dim * share) == width else math.nextafter(share, 1)


class _Scaling:
    """Scaling of the rotary frequencies of one file."""

    def __init__(self, file: GgufFile, numbers: ModelNumbers, rope: Rope, num_frequencies: int, context: int) -> None:
        self._file, self._numbers, self._rope = file, numbers, rope
        self._num_frequencies, self._context = num_frequencies, context
        # Without a type, llama.cpp divides the frequencies by the factor.
        self._kind = numbers.take("rope.scaling.type", "linear")
        older = _real_from_zero(numbers, "rope.scale_linear", 0.0)
        self._factor = _real_from_zero(numbers, "rope.scaling.factor", older)
        self._original = numbers.count("rope.scaling.original_context_length", context)
        self._attention_factor = float(numbers.real("rope.scaling.attn_factor", 1.0))
        is_rotated = numbers.take("rope.scaling.finetuned", True)
        if rope.is_switchable and not is_rotated:
            numbers.refuse("rope.scaling.finetuned", is_rotated)

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the scaling; {} without one."""
        tensors, is_scaled = self._file.tensors, self._kind != "none" and self._factor not in (0.0, 1.0)
        if self._rope.is_long and {LONG_DIVISORS, SHORT_DIVISORS} & tensors.keys():
            if is_scaled:
                self._numbers.refuse("rope.scaling.factor", self._factor, f"with a tensor {LONG_DIVISORS}")
            return self._longrope()
        if self._attention_factor != 1.0:
            self._numbers.refuse("rope.scaling.attn_factor", self._attention_factor)
        if self._rope.reads_divisors and DIVISORS in tensors:
            if is_scaled:
                self._numbers.refuse("rope.scaling.factor", self._factor, f"with a tensor {DIVISORS}")
            return self._llama3()
        if self._kind == "yarn" and not (self._rope.is_long or self._rope.is_proportional):
            return self._yarn()
        if self._kind not in ("none", "linear") or (is_scaled and self._rope.is_long):
            self._numbers.refuse("rope.scaling.type", self._kind)
        return {"rope_type": "linear", "factor": self._factor} if is_scaled else {}

    def _yarn(self) -> dict[str, Any]:
        numbers = self._numbers
        numbers.require("rope.scaling.yarn_ext_factor", 1.0)
        parameters = {
            "rope_type": "yarn",
            "factor": self._factor or 1.0,
            "original_max_position_embeddings": self._original,
            "beta_fast": float(numbers.real("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(numbers.real("rope.scaling.yarn_beta_slow", 1.0)),
        }
        if "rope.scaling.yarn_attn_factor" in numbers:
            parameters["attention_factor"] = float(numbers.real("rope.scaling.yarn_attn_factor"))
        parameters |= self._rope.yarn
        if multiplier := numbers.real("rope.scaling.yarn_log_multiplier", 0.0):
            # Files do not state the other one, for which llama.cpp takes 1.
            parameters |= {"mscale": 1.0, "mscale_all_dim": float(multiplier)}
        return parameters

    def _longrope(self) -> dict[str, Any]:
        long, short = (_floats(self._file, name, self._num_frequencies) for name in (LONG_DIVISORS, SHORT_DIVISORS))
        ratio = self._context / self._original
        usual = math.sqrt(1 + math.log(ratio) / math.log(self._original)) if ratio > 1 < self._original else 1.0
        parameters = {
            "rope_type": "longrope",
            "long_factor": [float(str(number)) for number in long],
            "short_factor": [float(str(number)) for number in short],
            "original_max_position_embeddings": self._original,
        }
        if not math.isclose(self._attention_factor, usual, rel_tol=_TOLERANCE):
            parameters["attention_factor"] = self._attention_factor
        return parameters

    def _llama3(self) -> dict[str, Any]:
        """Return the parameters of Llama 3's scaling if the divisors have its form."""
        divisors = _floats(self._file, DIVISORS, self._num_frequencies)
        if np.all(divisors == 1):
            return {}
        base = float(self._file.of_model("rope.freq_base") or _DEFAULT_BASE)
        parameters = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": _LOW_FREQ_FACTOR,
            "high_freq_factor": _HIGH_FREQ_FACTOR,
            "original_max_position_embeddings": _ORIGINAL_CONTEXT,
        }
        if not np.allclose(divisors, llama3_divisors(len(divisors), base, parameters), rtol=_TOLERANCE):
            raise Unsupported(
                f"model {str(self._file.path)!r} uses an unsupported RoPE scaling: its tensor {DIVISORS} has another "
                "form than Llama 3's; serve it with --backend llama-cpp",
                field="model",
            )
        return parameters


def llama3_divisors(num_frequencies: int, base: float, parameters: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return the divisor of each rotary frequency under Llama 3's scaling.  [D/2]

    Source: llama.cpp, `LlamaModel.generate_extra_tensors`.
    """
    frequencies = base ** (np.arange(num_frequencies) / -num_frequencies)
    wavelengths = 2 * math.pi / frequencies
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] / wavelengths
    share = np.clip((turns - low) / (high - low), 0, 1)
    divisors: NDArray[np.float64] = 1 / ((1 - share) / parameters["factor"] + share)
    return divisors


def _floats(file: GgufFile, name: str, num_frequencies: int) -> NDArray[np.float32]:
    tensor = file.tensors.get(name)
    if tensor is None or tensor.kind != _F32 or tensor.shape != (num_frequencies,):
        raise InvalidRequest(
            f"model {str(file.path)!r} needs a tensor {name} of {num_frequencies} numbers of type F32: convert or "
            "download it again",
            field="model",
        )
    return tensor.data.reshape(-1).view(np.float32)
