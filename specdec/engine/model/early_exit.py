"""Early exit: a target's first layers with its own norm and head, as a draft of its own output.

A draft step runs layers 0 to K - 1 over the same paged KV as a full step and writes their KV of its tokens; the full
step that verifies the tokens writes the same numbers again, so no other cache is needed. An adapter, if there is one,
maps the norm's output before the head reads it. The logits go, like a full step's, to
`specdec.engine.loop.draft_steps`. Loaded by `engine.local_drafting`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from specdec.contract.errors import InvalidRequest, Unsupported
from specdec.settings.draft_specs import LocalDraftSpec

if TYPE_CHECKING:  # its modules take 100 MB, and kept layouts are loaded without it
    from transformers import PreTrainedModel

_ADAPTER_FILE = "adapter.safetensors"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Affine map between norm and head."""

    weight: torch.Tensor  # [H, H]
    bias: torch.Tensor  # [H]

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        """Map [..., H] to [..., H]."""
        return nn.functional.linear(normed, self.weight, self.bias)

    def of_head(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight [V, H] and bias [V] of a head that applies the adapter and then the given head."""
        shift = weight @ self.bias
        return weight @ self.weight, shift if bias is None else shift + bias


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Point at which a draft step ends."""

    num_layers: int
    """Number of layers that a draft step runs; fewer than the model has."""
    adapter: Adapter | None = None


def load_early_exit(spec: LocalDraftSpec, model: PreTrainedModel) -> EarlyExit:
    """Load an early exit of a model.

    Raises:
        InvalidRequest: the model has too few layers, or the adapter is missing or does not fit.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    if not 1 <= spec.num_layers < num_layers:
        raise InvalidRequest(
            f"local draft {spec}: the target has {num_layers} layers, so an early exit runs 1 to {num_layers - 1}",
            field="local_draft",
        )
    return EarlyExit(spec.num_layers, _load_adapter(spec, model) if spec.path else None)


def _load_adapter(spec: LocalDraftSpec, model: PreTrainedModel) -> Adapter:
    path = Path(spec.path)
    path = path / _ADAPTER_FILE if path.is_dir() else path
    if not path.is_file():
        raise InvalidRequest(f"local draft {spec}: file {path} does not exist", field="local_draft")
    try:
        with safe_open(path, framework="pt") as file:
            made_for = (file.metadata() or {}).get("num_layers", str(spec.num_layers))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InvalidRequest(
            f"local draft {spec}: {path} is not a readable safetensors file", field="local_draft"
        ) from error
    if made_for != str(spec.num_layers):
        raise InvalidRequest(f"local draft {spec}: {path} is for {made_for[:16]} layers", field="local_draft")
    width = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[1]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {"weight": (width, width), "bias": (width,)}:
        raise InvalidRequest(
            f"local draft {spec}: {path} holds {str(shapes)[:200]}, not weight {(width, width)} and bias {(width,)}",
            field="local_draft",
        )
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise InvalidRequest(f"local draft {spec}: {path} holds numbers that are not finite", field="local_draft")
    placed = {name: tensor.to(device=model.device, dtype=model.dtype) for name, tensor in tensors.items()}
    return Adapter(placed["weight"], placed["bias"])


def shortened(model: PreTrainedModel, early_exit: EarlyExit) -> PreTrainedModel:
    """Return a model of the same modules that runs only the first layers, by transformers' own forward pass.

    Raises:
        Unsupported: the model's layers are not one list of modules.
    """
    inner = decoder_of(model)
    name, layers = _layers_of(model)
    short_list = nn.ModuleList(list(layers)[: early_exit.num_layers])
    head = model.get_output_embeddings()
    replaced: dict[nn.Module, nn.Module] = {inner: _with_modules(inner, {name: short_list})}
    if early_exit.adapter is not None:
        replaced[head] = _AdaptedHead(early_exit.adapter, head)
    short: PreTrainedModel = _replaced(model, replaced)  # type: ignore[assignment]
    return short


def _replaced(module: nn.Module, replaced: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a copy of a module in which other modules stand for some of those within it."""
    if module in replaced:
        return replaced[module]
    if not any(part in replaced for part in module.modules()):
        return module
    return _with_modules(module, {name: _replaced(child, replaced) for name, child in module.named_children()})


class _AdaptedHead(nn.Module):
    """Head that applies an adapter first."""

    def __init__(self, adapter: Adapter, head: nn.Module) -> None:
        super().__init__()
        self._adapter = adapter
        self._head = head

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(self._adapter(normed))
        return logits


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the module that has a model's decoder layers, or the whole decoder if they are not one list of modules."""
    decoder: nn.Module = model.get_decoder()
    num_layers = model.config.get_text_config().num_hidden_layers
    return next((module for module in decoder.modules() if _lists(module, num_layers)), decoder)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return a model's decoder layers. Raises Unsupported: they are not one list of modules."""
    return _layers_of(model)[1]


def _layers_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the attribute name of a model's list of decoder layers, and the list."""
    lists = _lists(decoder_of(model), model.config.get_text_config().num_hidden_layers)
    if len(lists) != 1:
        raise _unknown(model)
    return lists[0]


def _lists(module: nn.Module, num_layers: int) -> list[tuple[str, nn.ModuleList]]:
    """Return the children of a module, with their names, that are lists of this many modules."""
    return [
        (name, child)
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]


def _unknown(model: PreTrainedModel) -> Unsupported:
    return Unsupported(
        f"local drafts do not support a model of type {model.config.model_type}: its layers are not one module list",
        field="local_draft",
    )


def _with_modules(module: nn.Module, children: dict[str, nn.Module]) -> nn.Module:
    """Return a copy of a module with other children; the given module is not changed."""
    changed = copy.copy(module)
    changed._modules = {**module._modules, **children}
    return changed
