"""Choose the kernels of a model's linear layers.

They are PyTorch's, over weights in the fastest layout; PyTorch's int8 kernel on a CPU; or our own kernel if a row must
have the same bits in any batch or weights are int8 on a GPU. Called by `engine.loader` and
`engine.parallel.sharded_llama`.
"""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedModel

from specdec.engine.linear.int8 import Int8Projection
from specdec.engine.linear.projection import (
    LogitsProjection,
    Projection,
    ProjectionKinds,
    keeps_both_layouts,
)
from specdec.engine.linear.protocol import ProjectionMaker
from specdec.engine.linear.row_products import RowProjection
from specdec.engine.options import CompileOptions


def projection_kinds(model: PreTrainedModel, is_int8: bool, compiling: CompileOptions) -> ProjectionKinds:
    """Return the projections of a loaded model. Layers that hold int8 weights already make their own instead."""
    by_rows = compiling.multiplies_rows(model.device, is_int8=is_int8)
    # `torch.compile` chooses the layout of weights for its kernels, and cannot trace oneDNN's layout.
    plain = partial(Projection, both_layouts=keeps_both_layouts(model), is_blocked=not compiling.uses_torch_compile)
    # The head's weight stays exact: rounded logits would tie, and the head is one weight of many.
    head: ProjectionMaker = LogitsProjection if LogitsProjection.fits(model.get_output_embeddings().weight) else plain
    if not by_rows:
        return ProjectionKinds(inner=Int8Projection if is_int8 else plain, head=head)
    if not compiling.is_deterministic:  # all inner layers are `Int8Linear`, which make their own projections
        return ProjectionKinds(inner=plain, head=head)
    return ProjectionKinds(inner=RowProjection, head=partial(RowProjection, output_dtype=torch.float32))
