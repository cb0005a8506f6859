"""The compiled paged attention kernels on a GPU: the checks of the interpreted ones, and PyTorch's attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec.engine.cuda_graphs.paged_attention import ContextSplit
from tests.support.paged_rig import TOLERANCE, Heads, Part, Step, batch, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine: no kernel was compiled"),
]
SHIPPED = ContextSplit()
# Draft steps, verifications, chunks of prompts, contexts of many units, sequences without rows.
MIXED = batch((70, 1), (29, 5), (15, 20), (0, 9), (0, 1), (5, 0), (2100, 5), (500, 17), (4097, 1), (127, 1), (128, 1))


# Each is a kernel to compile, which takes over ten seconds in float32.
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(64, torch.float32), (128, torch.float16), *((dim, torch.bfloat16) for dim in (64, 80, 96, 128, 256))],
)
def test_heads_of_any_size_are_supported(dim: int, dtype: torch.dtype) -> None:
    check(Step(Heads(dim, num_kv=2, per_kv=4), MIXED, dtype, "cuda"), SHIPPED)


@pytest.mark.parametrize("per_kv", [1, 3, 12])
def test_any_number_of_heads_may_share_keys(per_kv: int) -> None:
    check(Step(Heads(128, num_kv=2, per_kv=per_kv), MIXED, torch.bfloat16, "cuda"), SHIPPED)


@pytest.mark.parametrize("window", [1, 129, 1000])
def test_a_window_limits_the_visible_keys(window: int) -> None:
    check(Step(Heads(128, window=window), MIXED, torch.bfloat16, "cuda"), SHIPPED)


def test_scores_are_capped() -> None:
    check(Step(Heads(128, softcap=5.0, window=200), MIXED, torch.bfloat16, "cuda"), SHIPPED)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 511, 8000])
def test_a_verification_equals_the_attention_of_pytorch(start: int, dtype: torch.dtype) -> None:
    heads = Heads(128, num_kv=8, per_kv=4)
    step = Step(heads, [Part(start, 5, seed=1)], dtype, "cuda")
    keys, values = (
        pages[step.tables[: -(-(start + 5) // 16)]].flatten(0, 1)[: start + 5].transpose(0, 1).unsqueeze(0)
        for pages in step.layer.pages()
    )
    visible = torch.ones(5, start + 5, dtype=torch.bool, device="cuda").tril(start)
    query = step.query.transpose(0, 1).unsqueeze(0)
    expected = scaled_dot_product_attention(query, keys, values, attn_mask=visible, enable_gqa=True)
    actual = step.attend(SHIPPED)
    torch.testing.assert_close(actual, expected[0].transpose(0, 1), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_other_rows(dtype: torch.dtype) -> None:
    for heads, start in ((Heads(128, 8, 4), 0), (Heads(128, 8, 4), 3000), (Heads(128, 8, 4, window=600), 3000)):
        alone = Step(heads, [Part(start, 1, seed=3)], dtype, "cuda").attend(SHIPPED)[0]
        company = [*batch((41, 3)), Part(start, 5, seed=3), *batch((900, 1))]
        assert torch.equal(Step(heads, company, dtype, "cuda", shuffle=1).attend(SHIPPED)[3], alone)
    chunk = Step(heads, [Part(start - 99, 110, seed=3)], dtype, "cuda", shuffle=2)
    assert torch.equal(chunk.attend(SHIPPED)[99], alone)
