"""Messages to ranks, and the part of a model that each rank holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from specdec.contract.errors import InvalidRequest
from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.parallel.rank_messages import STEP, pack_plan, unpack_plan
from specdec.engine.parallel.splitting import Cut, Splitting

_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40).map(tuple)
_slices = st.builds(
    SequenceSlice, token_ids=_ids, start=st.integers(0, 2**31 - 1), block_table=_ids, num_logit_rows=st.integers(0, 40)
)
_copies = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1)), max_size=5).map(tuple)


@given(st.builds(StepPlan, slices=st.lists(_slices, max_size=6).map(tuple), block_copies=_copies))
def test_unpacking_a_packed_plan_gives_the_same_plan(plan: StepPlan) -> None:
    message = pack_plan(plan)
    assert message.dtype == np.int32
    assert message[0] == STEP
    assert unpack_plan(message) == plan


def config(**fields: int) -> LlamaConfig:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 113,
             "vocab_size": 99}  # fmt: skip
    return LlamaConfig(**(sizes | fields))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("name", "size"),
    [("self_attn.q_proj.weight", 64), ("self_attn.o_proj.weight", 64), ("mlp.up_proj.weight", 113),
     ("mlp.down_proj.weight", 113), ("embed_tokens.weight", 99), ("lm_head.weight", 99)],
)  # fmt: skip
def test_every_row_or_column_belongs_to_exactly_one_rank(name: str, size: int, num_ranks: int) -> None:
    cuts = [Splitting.of(config(), rank, num_ranks).cut_of(name) for rank in range(num_ranks)]
    held = [index for cut in cuts if cut is not None for index in range(cut.start, cut.end)]
    assert held == list(range(size))
    columns = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    assert {cut.axis for cut in cuts if cut is not None} == {int(columns)}


@pytest.mark.parametrize(("kv_heads", "num_ranks"), [(4, 2), (4, 4), (4, 8), (2, 8), (1, 4)])
def test_each_rank_holds_the_kv_heads_of_its_queries(kv_heads: int, num_ranks: int) -> None:
    whole = config(num_key_value_heads=kv_heads)
    queries_per_kv_head = 8 // kv_heads
    for rank in range(num_ranks):
        splitting = Splitting.of(whole, rank, num_ranks)
        first_query = rank * splitting.own_heads
        needed = {head // queries_per_kv_head for head in range(first_query, first_query + splitting.own_heads)}
        cut = splitting.cut_of("self_attn.k_proj.weight")
        assert cut == splitting.cut_of("self_attn.v_proj.bias")
        assert cut is not None
        assert set(range(cut.start // 8, cut.end // 8)) == needed
        assert splitting.config_of(whole).num_key_value_heads == len(needed)


def test_a_bias_added_after_a_sum_belongs_to_the_first_rank_alone() -> None:
    first, second = (Splitting.of(config(), rank, 2).cut_of("mlp.down_proj.bias") for rank in range(2))
    assert first is None
    assert second is not None
    assert second == Cut(0, 0, 0, 64)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_ranks", "words"),
    [(8, 4, 3, "3 does not divide the model's 8 attention heads"), (6, 2, 3, "3 neither divides the model's 2 KV")],
)
def test_heads_that_cannot_be_divided_are_refused(heads: int, kv_heads: int, num_ranks: int, words: str) -> None:
    whole = config(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=48)
    with pytest.raises(InvalidRequest, match=words):
        Splitting.of(whole, 0, num_ranks)
