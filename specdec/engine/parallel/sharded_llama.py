"""One rank's part of a Llama-shaped model: read in slices, run by the stack that runs whole models.

transformers makes the model at the rank's own size, so every module is a part, and no rank ever holds the whole model.
Four places need the other ranks: the embedding, the outputs of attention and MLP, and the head. This module adds the
communication there, to our stack for serving and to transformers' own modules for the self-check.
`engine.parallel.splitting` says which part a rank holds. Called by `engine.parallel.rank_loader`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from specdec.checkpoints.rank_checks import FLAG
from specdec.contract.errors import Unsupported
from specdec.engine.linear.choice import projection_kinds
from specdec.engine.linear.int8 import hold_in_int8
from specdec.engine.linear.protocol import AnyProjection
from specdec.engine.linear.row_products import RowProjection
from specdec.engine.model.checkpoint_model import load_weights
from specdec.engine.model.llama_stack import LlamaStack
from specdec.engine.model.model_runner import ForwardPass
from specdec.engine.options import CompileOptions
from specdec.engine.parallel.group import RankGroup
from specdec.engine.parallel.slices import SliceReader
from specdec.engine.parallel.splitting import Splitting

_log = logging.getLogger(__name__)


class ShardedLlama:
    """A rank's part of a model that `LlamaStack.fits`."""

    def __init__(
        self, name: str, directory: Path, whole: PreTrainedModel, dtype: torch.dtype | str, ranks: RankGroup
    ) -> None:
        """Read this rank's part of the weights.

        Args:
            name: name of the model that the user gave.
            directory: directory of the checkpoint.
            whole: model as `engine.model.text_half.make_whole` returns it.
            dtype: dtype as `pick_dtype` returns it.
            ranks: group of the ranks that hold the other parts.

        Raises:
            InvalidRequest, Unsupported: as `SliceReader` and `Splitting.of`.
        """
        self._ranks = ranks
        if other_file := getattr(whole.config, "transformers_weights", None):
            raise Unsupported(
                f"{FLAG} reads model.safetensors or the files of its index; the config.json of model {name!r} names "
                f"{str(other_file)[:64]!r} (transformers_weights)",
                field="tensor_parallel",
            )
        self._splitting = Splitting.of(whole.config, ranks.rank, ranks.num_ranks)
        with SliceReader(name, directory) as reader:
            model = _read(name, reader, whole, self._splitting, dtype)
            _log.info(
                "read %d of %d bytes of weights", reader.num_bytes, reader.all_bytes,
                extra={"share_read": reader.num_bytes / reader.all_bytes},
            )  # fmt: skip
        # The decorator that transformers puts on `to` loses `self`.
        self.model: PreTrainedModel = model.to(ranks.device)  # type: ignore[arg-type]
        self.num_head_rows = int(whole.config.vocab_size)

    def hold_in_int8(self) -> None:
        """Round this rank's part of the layers' weights as the whole model's weights would be rounded."""
        hold_in_int8(self.model, RowProjection, self._reach)

    def forward_pass(self, compiling: CompileOptions, *, is_int8: bool) -> ForwardPass:
        """Take the model apart. The first rank gathers the logits; padding columns follow the vocabulary's.

        Args:
            compiling: how steps run. With `is_deterministic`, ranks sum in an order that does not depend on the number
                of rows, which takes longer.
            is_int8: whether the layers hold int8 weights.
        """
        look_up = self._look_up(self.model.model.embed_tokens.weight.detach())
        stack = LlamaStack(self.model, projection_kinds(self.model, is_int8, compiling))
        add_up = self._ranks.add_in_order if compiling.is_deterministic else self._ranks.add_up
        for layer in stack.layers:
            layer.output = _SummedProjection(layer.output, add_up)
            layer.down = _SummedProjection(layer.down, add_up)
        stack.embed, stack.head = look_up, _GatheredHead(stack.head, self._ranks)
        return stack

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Make the model's own forward pass return the whole model's logits, on every rank, within a `with` block."""
        inner, ranks = self.model.model, self._ranks
        hooks = [
            module.register_forward_hook(lambda _module, _inputs, part: ranks.add_up(part))
            for layer in inner.layers
            for module in (layer.self_attn.o_proj, layer.mlp.down_proj)
        ]
        hooks.append(self.model.lm_head.register_forward_hook(lambda _module, _inputs, part: ranks.gather_all(part)))
        inner.embed_tokens.forward = self._look_up(inner.embed_tokens.weight)
        try:
            yield
        finally:
            del inner.embed_tokens.forward  # the class has its own
            for hook in hooks:
                hook.remove()

    def _reach(self, name: str, own: torch.Tensor) -> torch.Tensor:
        return self._ranks.largest(own) if self._splitting.cuts_inputs_of(name) else own

    def _look_up(self, weight: torch.Tensor) -> partial[torch.Tensor]:
        return partial(_look_up, weight=weight, first=self._splitting.first_token, ranks=self._ranks)


class _SummedProjection(nn.Module):
    """Projection of a part of the inputs; its output is the sum over all ranks."""

    def __init__(self, part: AnyProjection, add_up: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._part = part
        self._add_up = add_up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._add_up(self._part.forward(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [T, out] + forward(x [T, in]); the residual is added once, after the sum."""
        return self.forward(x).add_(residual)


class _GatheredHead(nn.Module):
    """Projection to a part of the vocabulary; the first rank gathers all parts."""

    def __init__(self, part: AnyProjection, ranks: RankGroup) -> None:
        super().__init__()
        self._part = part
        self._ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of x [R, hidden]: [R, rows of all ranks] on the first rank, its own part on the others."""
        part = self._part.forward(x)
        # A step without logit rows has nothing to gather.
        return self._ranks.gather_first(part) if len(x) else part

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).add_(residual)


def _look_up(token_ids: torch.Tensor, *, weight: torch.Tensor, first: int, ranks: RankGroup) -> torch.Tensor:
    """Return the embeddings [..., hidden] of token_ids [...]: a rank adds the rows it holds, and zeros elsewhere."""
    own = token_ids - first
    is_absent = (own < 0) | (own >= len(weight))
    rows = embedding(own.clamp(0, len(weight) - 1), weight)
    return ranks.add_up(rows.masked_fill_(is_absent.unsqueeze(-1), 0))


def _read(
    name: str, reader: SliceReader, whole: PreTrainedModel, splitting: Splitting, dtype: torch.dtype | str
) -> PreTrainedModel:
    shapes = {key: parameter.shape for key, parameter in whole.state_dict().items()}
    parts = reader.parts(shapes, splitting.cut_of)
    return load_weights(
        name, type(whole), None, config=splitting.config_of(whole.config), dtype=dtype, state_dict=parts,
        ignore_mismatched_sizes=True,
    )  # fmt: skip
