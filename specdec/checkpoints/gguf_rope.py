"""Recover the RoPE scaling of a GGUF file, which transformers does not read. Only Llama 3's scaling is supported.

llama.cpp does not store the parameters of Llama 3's scaling. It stores the resulting divisor of each rotary frequency.
This module checks whether the parameters of the published Llama models give these divisors. Called by
`specdec.checkpoints.gguf_convert`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

DIVISORS = "rope_freqs.weight"

#: Parameters of every Llama since 3.1. Their factors differ (8 and 32), so the factor is taken from the file.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192
#: Relative tolerance of the comparison: the divisors are stored as float32.
_TOLERANCE = 1e-5


def is_readable(config: PreTrainedConfig, metadata: dict[str, Any], divisors: np.ndarray | None) -> bool:
    """Set the file's RoPE scaling on its configuration, if the scaling is supported.

    Args:
        config: configuration that transformers made from the file; changed in place.
        metadata: metadata of the file.
        divisors: the tensor `DIVISORS` of the file; None if it has none.  [D/2]

    Returns:
        True if the file has no scaling or a supported one.
    """
    if metadata.get(f"{metadata['general.architecture']}.rope.scaling.type", "none") != "none":
        return False
    if divisors is None:
        return True
    parameters = {
        "rope_type": "llama3",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": float(divisors.max()),
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_CONTEXT,
    }
    if not np.allclose(divisors, llama3_divisors(len(divisors), parameters), rtol=_TOLERANCE):
        return False
    config.rope_parameters = parameters
    return True


def llama3_divisors(num_frequencies: int, parameters: dict[str, Any]) -> np.ndarray:
    """Return the divisor of each rotary frequency under Llama 3's scaling.  [D/2]

    Source: llama.cpp, `convert_hf_to_gguf.py` (LlamaModel.generate_extra_tensors).
    """
    frequencies = parameters["rope_theta"] ** (np.arange(num_frequencies) / -num_frequencies)
    wavelengths = 2 * math.pi / frequencies
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] / wavelengths
    share = np.clip((turns - low) / (high - low), 0, 1)
    divisors: np.ndarray = 1 / ((1 - share) / parameters["factor"] + share)
    return divisors
