"""Argmax and coupled choices by the C++ kernels, in processes that have loaded them.

A coupled choice among 262,144 tokens takes a millisecond. A warm NumPy argmax is as fast as the kernel's, but a step
evicts NumPy's code from the caches when it reads the weights. Called by `rows` and `step_logits`, which have their own
implementation for processes without kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.core.random import seed_words
from specdec.engine.kernels.library import loaded_library


def argmax(logits: torch.Tensor) -> tuple[list[int], list[float]] | None:
    """Return the argmax of each row of float32 [R, V] on the host, and its logit.

    The first of equal logits wins, and a NaN counts as the largest. Return None if this process has no kernels or they
    do not support these rows.
    """
    library = loaded_library()
    num_rows, num_tokens = logits.shape
    if library is None or not num_tokens or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return None
    token_ids, maxima = (ctypes.c_int64 * num_rows)(), (ctypes.c_float * num_rows)()
    library.specdec_argmax(logits.data_ptr(), num_rows, logits.stride(0), num_tokens, token_ids, maxima)
    return token_ids[:], maxima[:]


def coupled_choices(
    distributions: torch.Tensor, seeds: Sequence[int], turns: Sequence[int], positions: Sequence[int]
) -> NDArray[np.int64] | None:
    """Return the chosen ids, int64 [R]; the arguments are those of `specdec.engine.logits.rows.coupled_choices`.

    Scores use the C library's logarithm, which may differ from that of PyTorch and NumPy in the last bit, as those
    differ from each other. Return None if this process has no kernels or they do not support these arguments.
    """
    library = loaded_library()
    if library is None or distributions.device.type != "cpu" or distributions.dtype != torch.float64:
        return None
    masses = distributions.contiguous()
    keys = [(*seed_words(seed), turn, position) for seed, turn, position in zip(seeds, turns, positions, strict=True)]
    if len(keys) != len(masses):
        return None
    key_rows = np.array(keys, dtype=np.uint32).reshape(-1, 4)  # `NoiseKey` of `kernels/noise.h`
    choices = np.empty(len(key_rows), dtype=np.int64)
    library.specdec_coupled_choices(
        masses.data_ptr(), *masses.shape, key_rows.ctypes.data, choices.ctypes.data, torch.get_num_threads()
    )
    return choices if (choices >= 0).all() else None  # a row without mass has no winner
