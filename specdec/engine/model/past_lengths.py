"""Tell attention modules that count past tokens at which position each row of a step is.

Most modules take positions from `position_ids`. Some count rows from the length of transformers' cache instead, such as
Llama 4 for the scale of its queries. A step has no such cache, and its rows belong to several sequences. So these
modules get an object in place of the cache that answers with one length for each row. Called by
`engine.model.model_runner`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch


class _PastLengths:
    """The part of transformers' cache that attention modules call."""

    def __init__(self, position_ids: torch.Tensor) -> None:
        self._position_ids = position_ids

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        """Return [T]: what a module adds to the index of each row."""
        num_rows = self._position_ids.shape[-1]
        return self._position_ids[0] - torch.arange(num_rows, device=self._position_ids.device)

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values


_lengths: ContextVar[_PastLengths | None] = ContextVar("past_lengths", default=None)


def follow_positions(model: torch.nn.Module) -> None:
    """Make the attention modules of a model that count past tokens follow `counting_from`."""
    for module in model.modules():
        code = inspect.unwrap(type(module).forward).__code__
        if hasattr(module, "layer_idx") and "get_seq_length" in code.co_names:
            module.register_forward_pre_hook(_give_lengths, with_kwargs=True)


@contextmanager
def counting_from(position_ids: torch.Tensor) -> Iterator[None]:
    """Make modules count from these positions [1, T], one for each row, within a `with` block."""
    setting = _lengths.set(_PastLengths(position_ids))
    try:
        yield
    finally:
        _lengths.reset(setting)


def _give_lengths(
    _module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    lengths = _lengths.get()
    return None if lengths is None else (arguments, named | {"past_key_values": lengths})
