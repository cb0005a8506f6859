"""Scaled positions of a GGUF file, which transformers does not read: Llama 3's are recovered, all others refused.

llama.cpp keeps no parameters of Llama 3's scaling, but what it makes of them: a divisor for each rotary frequency. The
parameters that give these divisors are looked for among those in use. Called by `specdec.checkpoints.gguf_convert`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

DIVISORS = "rope_freqs.weight"

#: Of every Llama since 3.1; their factors differ (8 and 32).
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192
#: They are stored as float32.
_TOLERANCE = 1e-5


def is_readable(config: PreTrainedConfig, metadata: dict[str, Any], divisors: np.ndarray | None) -> bool:
    """Sets the scaling that the file means on its configuration.

    Args:
        config: as transformers reads it.
        metadata: of the file.
        divisors: its tensor `DIVISORS`.  [D/2]

    Returns:
        Whether its positions are understood.
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
    """By what Llama 3 divides each rotary frequency.  [D/2]

    Source: llama.cpp, `convert_hf_to_gguf.py` (LlamaModel.generate_extra_tensors).
    """
    frequencies = parameters["rope_theta"] ** (np.arange(num_frequencies) / -num_frequencies)
    wavelengths = 2 * math.pi / frequencies
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] / wavelengths
    share = np.clip((turns - low) / (high - low), 0, 1)
    divisors: np.ndarray = 1 / ((1 - share) / parameters["factor"] + share)
    return divisors
