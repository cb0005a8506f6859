"""Learn from a model's own modules what each layer caches, how it attends, and over which length positions are steady.

There is no table of architectures and no reading of configurations: the arguments that the model passes to
transformers' attention interface and the masks that it requests describe its layers, and its rotary modules are asked
for the positions of short and of long sequences. `engine.model.self_check` finds what they do not tell. Called once
per model by `engine.load_pipeline`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from specdec.contract.errors import SpecdecError, Unsupported
from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.early_exit import decoder_of
from specdec.engine.model.kv_cache import LayerShape
from specdec.engine.model.recurrence import StateSizes, follow_recurrences, recurring
from specdec.engine.model.state_pools import StateLayout

PROBE_NAME = "specdec_probe"

# Arguments that change the result and that the paged attention does not support.
_UNKNOWN_ARGUMENTS = ("position_bias", "alibi")

# First positions of a sequence, of which every longer one must compute the same rotation.
_FIRST_POSITIONS = 8
# Relative difference of two rotations of one position that are equal except for rounding.
_ROTATION_ROUNDING = 1e-6

# Masks are examined over at most this many tokens.
_MOST_TOKENS = 1 << 17
# A larger number in a mask does not come from this module.
_MOST_LIMIT = 1 << 24


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    shape: LayerShape
    kind: AttentionKind


@dataclass(frozen=True, slots=True)
class _Probe:
    """One run of the probe."""

    model_type: str
    layers: list[ProbedLayer] = field(default_factory=list)


_running: ContextVar[_Probe | None] = ContextVar("probe", default=None)


def register_probe() -> None:
    """Register `PROBE_NAME` with transformers. Idempotent."""
    AttentionInterface.register(PROBE_NAME, _probe_attention)
    AttentionMaskInterface.register(PROBE_NAME, _describe_mask)


def probe_layers(model: PreTrainedModel) -> list[ProbedLayer]:
    """Run two tokens through a model loaded with `PROBE_NAME` attention.

    Returns:
        One cache layer for each call of the attention interface, in the order of the calls.

    Raises:
        Unsupported: some layer neither attends nor recurs, or does so in a way that steps do not support.
    """
    model_type = model.config.model_type
    num_layers = model.config.get_text_config().num_hidden_layers
    follow_recurrences(model)  # before a module of an unknown recurrence runs
    with _counting_calls(model, num_layers) as called:
        layers = _run(model)
    # Layers that look at images are not called for a text.
    num_needed = len(called) or num_layers
    if not layers or (len(layers) < num_needed and probe_states(model) is None):
        raise Unsupported(f"{len(layers)} of the {num_needed} layers of a model of type {model_type} have a KV cache")
    return layers


def probe_states(model: PreTrainedModel) -> StateLayout | None:
    """Run two tokens as `probe_layers` does; return what a hybrid's recurrent layers keep, None if there are none.

    Raises:
        Unsupported: a layer computes a recurrence that steps do not compute.
    """
    sizes = StateSizes()
    with recurring(sizes):
        _run(model)
    if not sizes.windows:
        return None
    return StateLayout(tuple(sizes.windows), tuple(sizes.states), model.dtype)


@contextmanager
def _counting_calls(model: PreTrainedModel, num_layers: int) -> Iterator[set[torch.nn.Module]]:
    """Collect the decoder layers that are called within a `with` block; none if the model has no list of them."""
    called: set[torch.nn.Module] = set()
    parts = decoder_of(model).children()
    lists = [part for part in parts if isinstance(part, torch.nn.ModuleList) and len(part) == num_layers]
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _: called.add(layer)) for part in lists[:1] for layer in part
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def steady_context(model: PreTrainedModel, context: int) -> int:
    """Return the longest sequence, up to `context`, whose first positions are rotated as those of a short one.

    Some models choose their rotary frequencies by the longest sequence of a batch (dynamic NTK, LongRoPE). Beyond their
    original context a session's length would change its own earlier tokens and the logits of other sessions.

    Args:
        model: a model loaded with `PROBE_NAME` attention.
        context: longest sequence that the configuration allows.
    """
    calls = _rotary_calls(model)

    def is_steady(length: int) -> bool:
        return all(call.is_steady(length) for call in calls)

    if context <= _FIRST_POSITIONS or is_steady(context):
        return context
    steady, changed = _FIRST_POSITIONS, context
    while changed - steady > 1:
        middle = (steady + changed) // 2
        steady, changed = (middle, changed) if is_steady(middle) else (steady, middle)
    return steady


@dataclass(frozen=True, slots=True)
class _RotaryCall:
    """Call of a rotary module in a forward pass, with its arguments."""

    module: torch.nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def is_steady(self, length: int) -> bool:
        """Return whether a sequence of this length leaves the rotation of the first positions as it is."""
        with_end = [*range(_FIRST_POSITIONS), length - 1]
        longer = self._rotate(with_end)
        shorter = self._rotate(range(_FIRST_POSITIONS + 1))  # last, because some modules keep the newest frequencies
        return all(
            torch.allclose(a[:-1], b[:-1], rtol=_ROTATION_ROUNDING, atol=0)
            for a, b in zip(longer, shorter, strict=True)
        )

    def _rotate(self, positions: Sequence[int]) -> list[torch.Tensor]:
        """Return what the module computes for these positions, each tensor with the positions first."""

        def replaced(argument: Any) -> Any:
            if not isinstance(argument, torch.Tensor):
                return argument
            if argument.is_floating_point():  # it tells dtype and device only
                return argument.float()
            return torch.tensor(positions, device=argument.device).expand(*argument.shape[:-1], -1)

        output = self.module(*map(replaced, self.arguments), **{k: replaced(v) for k, v in self.named.items()})
        tensors = output if isinstance(output, tuple) else (output,)
        return [tensor.movedim(tensor.shape.index(len(positions)), 0) for tensor in tensors]


def _rotary_calls(model: PreTrainedModel) -> list[_RotaryCall]:
    """Return the calls of a model's rotary modules in one forward pass."""
    calls: list[_RotaryCall] = []

    def note(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append(_RotaryCall(module, arguments, named))

    modules = [
        m for m in model.modules() if any(name.endswith("inv_freq") for name, _ in m.named_buffers(recurse=False))
    ]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        _run(model)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _run(model: PreTrainedModel) -> list[ProbedLayer]:
    """Run two tokens through a model loaded with `PROBE_NAME` attention; return its layers."""
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device).unsqueeze(0)
    with probing(model.config.model_type) as layers, torch.inference_mode():
        model(input_ids=tokens, position_ids=positions, use_cache=False)
    return layers


@contextmanager
def probing(model_type: str) -> Iterator[list[ProbedLayer]]:
    """Make modules loaded with `PROBE_NAME` attention append a layer per call to the list, within a `with` block."""
    probe = _Probe(model_type)
    setting = _running.set(probe)
    try:
        yield probe.layers
    finally:
        _running.reset(setting)


def is_probing() -> bool:
    """Return whether the probe runs, which looks at shapes and masks and at no weights."""
    return _running.get() is not None


@contextmanager
def refusing_failures(config: PreTrainedConfig) -> Iterator[None]:
    """Turn any failure of a model into `Unsupported` with the model's type, except lack of memory."""
    try:
        yield
    except (SpecdecError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers' modules raise errors of any type
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise Unsupported(f"a model of type {config.model_type} does not run in this engine: {reason}") from error


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    probe = _current()
    unknown = [name for name in _UNKNOWN_ARGUMENTS if others.get(name) is not None]
    if unknown or not getattr(module, "is_causal", True):
        raise _refusal("attends")
    # A model's own attention uses the mask alone; the argument is for kernels that take no mask.
    window, chunk = (sliding_window, None) if attention_mask is None else _read_limits(attention_mask)
    group = query.shape[1] // key.shape[1]
    shape = LayerShape(num_kv_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3])
    probe.layers.append(ProbedLayer(shape, AttentionKind(window, group, softcap, s_aux is not None, chunk)))
    return value.repeat_interleave(group, dim=1).transpose(1, 2).contiguous(), None


def _describe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    config: PreTrainedConfig,
    local_size: int | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return a tensor in place of a mask, which says in every element what a token sees of the tokens before it.

    That is the size of the window, 0 if it sees all, -1 if nothing, and -1 - n if it sees those in its chunk of n.

    Raises:
        Unsupported: the mask is neither causal nor causal within a window or within chunks.
    """
    tokens = min(getattr(config, "max_position_embeddings", None) or _MOST_TOKENS, _MOST_TOKENS)
    if local_size is not None and local_size >= tokens:
        tokens = local_size + 1
    try:
        limit = _limit_of(mask_function, tokens, device)
    except IndexError:  # the function indexes its tokens, which are those of the probe
        limit = _limit_of(mask_function, kv_length, device) or local_size or 0
    return torch.full((batch_size, 1, q_length, kv_length), float(limit), dtype=torch.float32, device=device)


def _limit_of(mask_function: Callable[..., torch.Tensor], tokens: int, device: torch.device | None) -> int:
    """Return what a mask over this many tokens says, as `_describe_mask` does."""
    first, keys = torch.zeros((), dtype=torch.int64, device=device), torch.arange(tokens, device=device)

    def sees(position: int) -> torch.Tensor:
        return mask_function(first, first, torch.tensor(position, device=device), keys).expand(tokens)

    def is_like(limit: int, first_visible: Callable[[int], int]) -> bool:
        looked_at = {0, 1, 7, limit - 1, limit, limit + 1, tokens // 3, tokens // 2, tokens - 2, tokens - 1}
        return all(
            torch.equal(sees(position), (keys <= position) & (keys >= first_visible(position)))
            for position in looked_at & set(range(tokens))
        )

    window = int(sees(tokens - 1).sum())
    if is_like(window, lambda position: position - window + 1):
        return 0 if window == tokens else window or -1
    chunk = bisect_left(range(tokens), True, key=lambda position: not sees(position)[0])  # its tokens see the first one
    if chunk and is_like(chunk, lambda position: position // chunk * chunk):
        return -1 - chunk
    raise _refusal("masks what its layers see")


def _read_limits(mask: torch.Tensor) -> tuple[int | None, int | None]:
    """Return the sizes of the window and of the chunks that `_describe_mask` put into a mask."""
    limit = mask.flatten()[0].item()
    if mask.dtype != torch.float32 or not torch.all(mask == limit) or limit == -1 or abs(limit) > _MOST_LIMIT:
        raise _refusal("changes its masks")
    return (int(limit) or None, None) if limit >= 0 else (None, -1 - int(limit))


def _current() -> _Probe:
    probe = _running.get()
    if probe is None:
        raise RuntimeError(f"{PROBE_NAME} attention was called outside the probe")
    return probe


def _refusal(what: str) -> Unsupported:
    return Unsupported(f"a model of type {_current().model_type} {what} in a way this engine does not compute")
