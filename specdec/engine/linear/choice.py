"""Which products a model's linear layers are computed by.

PyTorch's over weights as they multiply fastest, its int8 kernel on a CPU, or our own kernel where a row must have the
same bits in any company or weights are int8 on a GPU. Not here: the products (`engine.linear.projection`,
`engine.linear.int8`, `engine.linear.row_products`). Called by `engine.loader` and
`engine.parallel.rank_loader`.
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
    """The products of a loaded model; where weights are held in int8 already, those of the layers go for none."""
    by_rows = compiling.multiplies_rows(model.device, is_int8=is_int8)
    # `torch.compile` lays weights out as its kernels read them, and cannot trace oneDNN's layout.
    plain = partial(Projection, both_layouts=keeps_both_layouts(model), is_blocked=not compiling.uses_torch_compile)
    # The logits stay exact: in bfloat16 they would tie, and their weight is one of many.
    head: ProjectionMaker = LogitsProjection if LogitsProjection.fits(model.get_output_embeddings().weight) else plain
    if not by_rows:
        return ProjectionKinds(inner=Int8Projection if is_int8 else plain, head=head)
    if not compiling.is_deterministic:  # all inner layers are `Int8Linear`, which make their own projections
        return ProjectionKinds(inner=plain, head=head)
    return ProjectionKinds(inner=RowProjection, head=partial(RowProjection, output_dtype=torch.float32))
