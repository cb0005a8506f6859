"""Recurrent layers of hybrids over a ragged step, in place of the functions that transformers' modules call.

Hybrids mix tokens by attention (`engine.model.attention`) and by recurrences whose state has one size, however long the
sequence is. Their modules compute a short causal convolution and then, unless it is all, the gated delta rule or the
scan of Mamba 2, by functions of the module's file. Within `recurring`, these functions compute a step: each slice
begins with the state in its source slot, and the states after some of its rows are saved (`SliceStates`).

Rows run one after the other, which gives the same bits however they are grouped into steps. Only long runs of prompt
tokens go to transformers' own function, which computes them in chunks and takes and returns a state.

`layer_probe` records the sizes of the states by `StateSizes`. Called by transformers' modules.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any, Protocol, cast

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from specdec.contract.errors import Unsupported
from specdec.engine.model.batch import RowSlice, StepBatch
from specdec.engine.model.recurrent_rows import Rows, Saves, delta_rule, scan
from specdec.engine.model.state_pools import StatePools

#: Runs of more rows than this are computed in chunks.
MAX_SINGLE_ROWS = 32

_CONVOLUTION, _DELTA_RULE, _SCAN = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
# Functions for one row with a cache, and for training, which steps do not call.
_NOT_CALLED = (
    "causal_conv1d_update", "torch_recurrent_gated_delta_rule", "mamba2_selective_state_update",
    "mamba2_split_conv1d_scan_combined",
)  # fmt: skip
# Arguments with a row a token.
_DELTA_ROWS = ("query", "key", "value", "g", "beta")
_SCAN_ROWS = ("hidden_states", "dt", "B", "C")
# In the square root of a norm.
_NORM_EPSILON = 1e-6

Function = Callable[..., Any]


class RecurrentContext(Protocol):
    """Contract of what computes in place of the functions of recurrent modules."""

    def convolve(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None,
                 function: Function) -> torch.Tensor:  # fmt: skip
        """Convolve rows [1, channels, T] by weights [channels, width]."""
        ...

    def delta_rule(self, arguments: dict[str, Any], function: Function) -> tuple[torch.Tensor, None]:
        """Compute the gated delta rule of `function`, given its arguments by name."""
        ...

    def scan(self, arguments: dict[str, Any], function: Function) -> torch.Tensor:
        """Compute the scan of Mamba 2 of `function`, given its arguments by name."""
        ...


_context: ContextVar[RecurrentContext | None] = ContextVar("recurrent_context", default=None)


@contextmanager
def recurring(context: RecurrentContext) -> Iterator[None]:
    """Make recurrent modules compute in `context` within a `with` block."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def recurring_in(batch: StepBatch, pools: StatePools | None) -> AbstractContextManager[None]:
    """Make recurrent modules compute one step within a `with` block; nothing if the model has none."""
    return nullcontext() if pools is None else recurring(RecurrentStep(batch.slices, pools))


def follow_recurrences(model: PreTrainedModel) -> None:
    """Make the recurrent modules of a model call the context within `recurring`. Idempotent.

    Raises:
        Unsupported: a module calls a recurrence that steps do not compute; the message contains its class.
    """
    # It warns that steps use functions of PyTorch, which is what they are to do.
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    for kind in {type(module) for module in model.modules()}:
        forward = inspect.unwrap(kind.forward)
        called = [name for name in forward.__code__.co_names if hasattr(forward.__globals__.get(name), "__wrapped__")]
        if _CONVOLUTION not in called:
            continue
        for name in called:
            if name in _REPLACED:
                _replace(forward.__globals__, name)
            elif name not in _NOT_CALLED and name.startswith(("chunk_", "torch_chunk_", "mamba")):
                raise Unsupported(
                    f"a model of type {model.config.model_type} computes {name} in layers of class {kind.__name__}, a "
                    "recurrence that this engine does not have; serve it with --backend vllm",
                    field="model",
                )


def _replace(namespace: dict[str, Any], name: str) -> None:
    function = namespace[name]
    if hasattr(function, "specdec_replaces"):
        return
    replacing = _REPLACED[name](function)
    replacing.specdec_replaces = function  # type: ignore[attr-defined]
    replacing.__wrapped__ = function  # type: ignore[attr-defined]
    namespace[name] = replacing


def _convolution(function: Function) -> Function:
    def convolve(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None,
        **others: Any,
    ) -> torch.Tensor:  # fmt: skip
        context = _context.get()
        if context is None:
            return cast(torch.Tensor, function(rows, weight, bias, activation=activation, **others))
        return context.convolve(rows, weight, bias, activation, function)

    return convolve


def _recurrence(method: str) -> Callable[[Function], Function]:
    def replacing(function: Function) -> Function:
        signature = inspect.signature(inspect.unwrap(function))

        def recur(*arguments: Any, **named: Any) -> Any:
            context = _context.get()
            if context is None:
                return function(*arguments, **named)
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            return getattr(context, method)(dict(bound.arguments), function)

        return recur

    return replacing


_REPLACED: dict[str, Callable[[Function], Function]] = {
    _CONVOLUTION: _convolution,
    _DELTA_RULE: _recurrence("delta_rule"),
    _SCAN: _recurrence("scan"),
}


@dataclass(slots=True)
class StateSizes:
    """Implements `RecurrentContext`: it records the sizes of the states and computes as transformers does."""

    windows: list[tuple[int, ...]] = field(default_factory=list)
    """Per convolution: the number of rows before a row that it reads, and its channels."""
    states: list[tuple[int, ...]] = field(default_factory=list)
    """Per recurrence: the shape of its state."""

    def convolve(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None,
                 function: Function) -> torch.Tensor:  # fmt: skip
        self.windows.append((weight.shape[1] - 1, weight.shape[0]))
        return cast(torch.Tensor, function(rows, weight, bias, activation=activation))

    def delta_rule(self, arguments: dict[str, Any], function: Function) -> tuple[torch.Tensor, None]:
        value = arguments["value"]
        self.states.append((value.shape[2], arguments["key"].shape[3], value.shape[3]))
        return cast(tuple[torch.Tensor, None], function(**arguments))

    def scan(self, arguments: dict[str, Any], function: Function) -> torch.Tensor:
        self.states.append((*arguments["hidden_states"].shape[2:], arguments["B"].shape[3]))
        return cast(torch.Tensor, function(**arguments))


class RecurrentStep:
    """Implements `RecurrentContext` for one step."""

    def __init__(self, slices: Sequence[RowSlice], pools: StatePools) -> None:
        self._slices = slices
        self._pools = pools
        self._convolutions, self._recurrences = count(), count()

    def convolve(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None,
                 function: Function) -> torch.Tensor:  # fmt: skip
        """Convolve each slice with the rows before it."""
        windows = self._pools.windows[next(self._convolutions)]
        num_before, by_row = weight.shape[1] - 1, rows[0].transpose(0, 1).to(weight.dtype)
        joined, kept = list[torch.Tensor](), list[int]()
        for each in self._slices:
            own = by_row[each.first : each.first + each.num_rows]
            source = each.states.source
            whole = torch.cat((own.new_zeros(num_before, own.shape[1]) if source is None else windows[source], own))
            for end, slot in each.states.saves:
                windows[slot] = whole[end : end + num_before]
            first = len(joined) * num_before + each.first
            kept += range(first, first + each.num_rows)
            joined.append(whole)
        flat, taps = torch.cat(joined), weight.transpose(0, 1)
        # Tap after tap: a library's convolution rounds differently for other numbers of rows.
        length = len(flat) - num_before
        output = flat[:length] * taps[0]
        for place in range(1, num_before + 1):
            output += flat[place : place + length] * taps[place]
        if len(joined) > 1:
            output = output[kept]
        if bias is not None:
            output += bias
        if activation is not None:
            output = ACT2FN[activation](output)
        return output.to(rows.dtype).transpose(0, 1).unsqueeze(0)

    def delta_rule(self, arguments: dict[str, Any], function: Function) -> tuple[torch.Tensor, None]:
        """See `RecurrentContext.delta_rule`."""
        states = self._pools.states[next(self._recurrences)]
        query, key, value, decay, beta = (arguments[name][0].float() for name in _DELTA_ROWS)
        if arguments["use_qk_l2norm_in_kernel"]:
            query, key = _normalised(query), _normalised(key)
        whole = Rows(decay.exp(), beta, value, key, query * query.shape[-1] ** -0.5)

        def run_chunk(rows: slice, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            part = {name: arguments[name][:, rows] for name in _DELTA_ROWS}
            begin = None if state is None else state.unsqueeze(0)
            output, last = function(**arguments | part | {"initial_state": begin, "output_final_state": True})
            return output[0], last[0]

        output = self._run(states, whole, run_chunk, delta_rule)
        return output.to(arguments["value"].dtype).unsqueeze(0), None

    def scan(self, arguments: dict[str, Any], function: Function) -> torch.Tensor:
        """See `RecurrentContext.scan`."""
        states = self._pools.states[next(self._recurrences)]
        values, step, write, read = (arguments[name][0].float() for name in _SCAN_ROWS)
        if arguments["dt_bias"] is not None:
            step = arguments["dt"][0] + arguments["dt_bias"].to(arguments["dt"].dtype)
        if arguments["dt_softplus"]:
            step = functional.softplus(step)
        step = step.clamp(*arguments["dt_limit"]).float()
        whole = Rows((arguments["A"].float() * step).exp(), step, values, write, read)

        def run_chunk(rows: slice, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            part = {name: arguments[name][:, rows] for name in _SCAN_ROWS}
            begin = None if state is None else state.unsqueeze(0)
            own = arguments | part | {"initial_states": begin, "return_final_states": True, "D": None}
            output, last = function(**own)
            return output[0], last[0]

        output = self._run(states, whole, run_chunk, scan)
        if arguments["D"] is not None:
            output += arguments["D"].unsqueeze(-1) * values
        return output.unsqueeze(0)

    def _run(
        self,
        states: torch.Tensor,
        whole: Rows,
        run_chunk: Callable[[slice, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]],
        run_rows: Callable[[Rows, torch.Tensor | None, torch.Size, Saves], torch.Tensor],
    ) -> torch.Tensor:
        """Run every slice: short runs of rows one by one, the others in chunks; return the output of all rows."""
        output, shape = torch.empty_like(whole.values), states.shape[1:]
        for each in self._slices:
            state = None if each.states.source is None else states[each.states.source]
            for start, end, saves in each.runs(MAX_SINGLE_ROWS):
                rows = slice(each.first + start, each.first + end)
                saved = [(num_rows, states[slot]) for num_rows, slot in saves]
                if end - start > MAX_SINGLE_ROWS:
                    output[rows], state = run_chunk(rows, state)
                    for _, kept in saved:
                        kept.copy_(state)
                    continue
                if end < each.num_rows:  # the rest begins here
                    last = torch.empty_like(states[0])
                    saved.append((end - start, last))
                part = Rows(*(getattr(whole, field.name)[rows] for field in fields(Rows)))
                output[rows] = run_rows(part, state, shape, saved)
                if end < each.num_rows:
                    state = last
        return output


def _normalised(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().sum(dim=-1, keepdim=True) + _NORM_EPSILON)
