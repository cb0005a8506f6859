"""Local drafts on the wire: they arrive unchanged, and malformed ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.contract.errors import Internal, InvalidRequest
from specdec.contract.types import (
    WEIGHT_TOTAL,
    DistributionRow,
    LocalDraft,
    Proposal,
    SamplingFilters,
    Support,
    Verification,
    VerifyRequest,
)
from specdec.rpc import codec, verifications
from specdec.v1 import target_pb2
from tests.support.arithmetic_engines import ArithmeticTarget
from tests.support.links import decode_verification
from tests.support.round_driver import make_round

NO_TOKENS = np.empty(0, np.uint32)


def request(gamma: int = 3, *, temperature: float = 1.0) -> VerifyRequest:
    position = make_round([3, 4, 5], filters=SamplingFilters(temperature=temperature))
    return VerifyRequest(position, NO_TOKENS, (), local_draft=LocalDraft("early-exit", gamma))


def support(*token_ids: int) -> Support:
    return Support(np.array(token_ids, np.uint32), np.arange(1, len(token_ids) + 1, dtype=np.uint16))


def drafted(*token_ids: int, supports: tuple[Support, ...]) -> Proposal:
    return Proposal(np.array(token_ids, np.uint32), supports, (0.01,) * len(supports), 5, 3, 0.25)


def verification(proposal: Proposal | None, sizes: tuple[int, ...]) -> Verification:
    """Return rows with equal p on the support and the tail."""
    rows = []
    for size in (*sizes, 0):
        weights = np.full(size + 1, WEIGHT_TOTAL // (size + 1), np.uint32)
        weights[-1] += WEIGHT_TOTAL - int(weights.sum(dtype=np.int64))
        rows.append(DistributionRow(weights, 2, 0.5))
    return Verification(NO_TOKENS, np.empty(0), tuple(rows), (), 5, 3, 0.5, 4, drafted=proposal)


def sent(answer: Verification) -> target_pb2.Verification:
    return target_pb2.Verification.FromString(verifications.encode_verification(answer, 1).SerializeToString())


def test_a_local_draft_arrives_with_its_distributions() -> None:
    ours = drafted(7, 9, supports=(support(4, 7), support(9, 11, 12)))
    read = decode_verification(sent(verification(ours, (2, 3))), request())
    assert read.drafted is not None
    assert read.drafted.draft_token_ids.tolist() == [7, 9]
    assert [one.token_ids.tolist() for one in read.drafted.supports] == [[4, 7], [9, 11, 12]]
    assert [one.weights.tolist() for one in read.drafted.supports] == [[1, 2], [1, 2, 3]]
    assert read.drafted.forward_s == 0.25
    assert [len(row.weights) for row in read.rows] == [3, 4, 1]


def test_a_target_that_drafted_nothing_answers_a_target_only_step() -> None:
    read = decode_verification(sent(verification(None, ())), request())
    assert read.drafted is None
    assert len(read.rows) == 1


def test_a_local_draft_that_was_not_requested_is_not_read() -> None:
    ours = drafted(7, supports=(support(4, 7),))
    plain = VerifyRequest(request().position, NO_TOKENS, ())
    with pytest.raises(Internal, match="malformed verification"):
        decode_verification(sent(verification(ours, (2,))), plain)


@pytest.mark.parametrize(
    "proposal",
    [
        drafted(7, 7, 7, 7, supports=(support(4, 7),) * 4),  # more tokens than requested
        drafted(8, supports=(support(4, 7),)),  # a token that is not in its support
        drafted(7, 7, supports=(support(4, 7),)),  # a token without a support
        drafted(7, supports=(Support(np.array([4, 7], np.uint32), np.array([0, 2], np.uint16)),)),
    ],
    ids=["too many", "outside its support", "without a support", "weight 0"],
)
def test_a_malformed_local_draft_is_the_targets_fault(proposal: Proposal) -> None:
    with pytest.raises(Internal, match="malformed verification"):
        decode_verification(sent(verification(proposal, (2,) * len(proposal.draft_token_ids))), request())


def test_a_request_for_a_local_draft_survives_the_wire_and_is_checked() -> None:
    limits = ArithmeticTarget().info()
    message = codec.encode_verify_request(request(gamma=30, temperature=0.0), 1)
    assert codec.decode_verify_request(message, limits).local_draft == LocalDraft("early-exit", 30)
    message.local_draft.gamma = 0
    with pytest.raises(InvalidRequest, match="at least 1"):
        codec.decode_verify_request(message, limits)
    message.local_draft.gamma = 2
    message.draft_token_ids.append(4)
    with pytest.raises(InvalidRequest, match="with draft_token_ids"):
        codec.decode_verify_request(message, limits)
