"""Choices among logits and laws by the kernels, where this process has them.

The coupled winner of 262,144 tokens takes a millisecond. A row's likeliest token takes NumPy no longer; but after a
step has read its weights through all caches, NumPy's own code comes from memory again. Not here: what a coupled choice
is (`rows`), what is made of likeliest tokens (`step_logits`); these two call this, and choose by themselves elsewhere.
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
    """Of each row of float32 [R, V] on the host: the first of its likeliest tokens, and its logit; what is no number
    counts as larger than anything. None where this process has no kernels, or they are not for these rows.
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
    """The chosen ids, int64 [R]; arguments as in `specdec.engine.logits.rows.coupled_choices`.

    Scores are the C library's logarithms: they may differ from PyTorch's and NumPy's in the last bit, as those do from
    each other. None where this process has no kernels, or they are not for that; the caller then finds out why.
    """
    library = loaded_library()
    if library is None or distributions.device.type != "cpu" or distributions.dtype != torch.float64:
        return None
    masses = distributions.contiguous()
    keys = [(*seed_words(seed), turn, position) for seed, turn, position in zip(seeds, turns, positions, strict=True)]
    if len(keys) != len(masses):
        return None
    of_rows = np.array(keys, dtype=np.uint32).reshape(-1, 4)  # as `NoiseKey` in `kernels/noise.h`
    choices = np.empty(len(of_rows), dtype=np.int64)
    library.specdec_coupled_choices(
        masses.data_ptr(), *masses.shape, of_rows.ctypes.data, choices.ctypes.data, torch.get_num_threads()
    )
    return choices if (choices >= 0).all() else None  # a row without mass has no winner
