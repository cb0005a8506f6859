"""A damaged reply of a replica is a valid answer or an error of its own request; other requests are answered.

Replies of honest laws are damaged in their bytes; what protobuf can still read goes through the codec as one frame.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.contract.errors import Internal
from specdec.contract.types import (
    WEIGHT_TOTAL,
    DrawRule,
    Proposal,
    ProposeRequest,
    SamplingFilters,
    SessionPosition,
    Verification,
    VerifyRequest,
)
from specdec.core.block import verify_block
from specdec.core.random import DrawKey
from specdec.core.reference import cut_support, distribution_row
from specdec.core.rejection import verify_rejection
from specdec.core.sparse import draw_from_support
from specdec.rpc import proposals, verifications
from tests.support.links import decode_verification

VOCABULARY_SIZE = 20
REPLIES = 3
NO_IDS = np.empty(0, np.uint32)

damages = st.lists(
    st.tuples(st.sampled_from(("set", "delete", "insert", "cut")), st.floats(0.0, 0.999), st.integers(0, 255)),
    min_size=1,
    max_size=3,
)


class Exchange:
    """The requests of one round and their correct answers."""

    def __init__(self, seed: int, num_draft_tokens: int, *, is_greedy: bool) -> None:
        generator = np.random.default_rng(seed)
        filters = SamplingFilters(temperature=0.0 if is_greedy else 1.0)
        round_ = SessionPosition(
            "session", 1, 1, 0, b"", np.array([3], np.uint32), filters, 1, 0, 0, DrawRule.DISTRIBUTION
        )
        laws = generator.dirichlet(np.full(VOCABULARY_SIZE, 0.3), size=(2, num_draft_tokens + 1))
        supports = [cut_support(laws[0, index], 8)[0] for index in range(num_draft_tokens)]
        key = DrawKey(seed, 0, 1)
        self.drafted = [draw_from_support(support, key, index) for index, support in enumerate(supports)]
        ids = [support.token_ids for support in supports]
        token_ids = np.array(self.drafted, np.uint32)
        rows = tuple(distribution_row(laws[1, index], on, 0.5) for index, on in enumerate([*ids, NO_IDS]))
        choices = NO_IDS if not is_greedy else np.append(token_ids, np.uint32(1))
        self.propose = ProposeRequest(round_, max(1, num_draft_tokens))
        self.verify = VerifyRequest(round_, token_ids, () if is_greedy else tuple(ids))
        self.proposal = Proposal(token_ids, () if is_greedy else tuple(supports), (), 1, 0, 0.1)
        self.verification = Verification(
            choices,
            np.ones(len(choices)),
            () if is_greedy else rows,
            (),
            kv_len=1,
            num_cached_tokens=0,
            forward_s=0.1,
            step_tokens=9,
        )


exchanges = st.builds(Exchange, st.integers(0, 1000), st.integers(0, 4), is_greedy=st.booleans())


def damaged(message: Any, damage: list[tuple[str, float, int]]) -> Any:
    """Return the message with some bytes changed; unchanged where protobuf cannot parse the result."""
    content = bytearray(message.SerializeToString())
    for kind, place, value in damage:
        at = int(place * len(content))
        if kind == "insert" or not content:
            content.insert(at, value)
        elif kind == "set":
            content[at] = value
        else:
            del content[at : at + 1 if kind == "delete" else len(content)]
    try:
        return type(message).FromString(bytes(content))
    except DecodeError:
        return message


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(exchanges, min_size=REPLIES, max_size=REPLIES), st.integers(0, REPLIES - 1), damages)
def test_a_damaged_draft_is_refused_alone_or_is_a_valid_draft(
    asked: list[Exchange], victim: int, damage: list[tuple[str, float, int]]
) -> None:
    messages = [proposals.encode_proposal(exchange.proposal, index) for index, exchange in enumerate(asked)]
    messages[victim] = damaged(messages[victim], damage)
    answers = proposals.decode_proposals(messages, [exchange.propose for exchange in asked])
    assert not any(isinstance(answer, Internal) for index, answer in enumerate(answers) if index != victim)
    answer = answers[victim]
    if isinstance(answer, Internal):
        return
    assert len(answer.draft_token_ids) <= asked[victim].propose.gamma
    for token_id, support in zip(answer.draft_token_ids, answer.supports, strict=False):
        assert token_id in support.token_ids
        assert len(support.token_ids) == len(support.weights)
        assert (np.diff(support.token_ids.astype(np.int64)) > 0).all()
        assert (support.weights > 0).all()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(exchanges, min_size=REPLIES, max_size=REPLIES), st.integers(0, REPLIES - 1), damages)
def test_a_damaged_verification_is_refused_alone_or_decides_a_valid_round(
    asked: list[Exchange], victim: int, damage: list[tuple[str, float, int]]
) -> None:
    messages = [verifications.encode_verification(exchange.verification, index) for index, exchange in enumerate(asked)]
    messages[victim] = damaged(messages[victim], damage)
    answers = verifications.decode_verifications(messages, [exchange.verify for exchange in asked])
    assert not any(isinstance(answer, Internal) for index, answer in enumerate(answers) if index != victim)
    answer, exchange = answers[victim], asked[victim]
    if isinstance(answer, Internal):
        return
    if not answer.rows:
        assert len(answer.choice_token_ids) == len(exchange.drafted) + 1
        return
    assert len(answer.rows) == len(exchange.drafted) + 1
    assert all(row.weights.sum(dtype=np.int64) == WEIGHT_TOTAL for row in answer.rows)
    for verify in (verify_rejection, verify_block):
        decision = verify(exchange.drafted, exchange.proposal.supports, answer.rows, DrawKey(1, 0, 1))
        assert min(decision.token_ids) >= 0


@pytest.mark.parametrize("moved", [1, -1, 1 << 31])
def test_weights_that_do_not_sum_to_the_total_are_refused(moved: int) -> None:
    exchange = Exchange(1, 2, is_greedy=False)
    message = verifications.encode_verification(exchange.verification, 0)
    weights = np.frombuffer(message.weights, "<u4").copy()
    weights[0] = (int(weights[0]) + moved) % (1 << 32)
    message.weights = weights.tobytes()
    with pytest.raises(Internal, match="sum"):
        decode_verification(message, exchange.verify)
