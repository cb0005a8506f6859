"""The checks of a replica's answer: it may not exceed its request or name a token outside the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.round.answers import check_proposal, check_verification, target_fault
from specdec.contract.errors import (
    Internal,
    InvalidRequest,
    KvMiss,
    ResourceExhausted,
    SpecdecError,
    StaleEpoch,
    Unavailable,
)
from specdec.contract.types import WEIGHT_TOTAL, DistributionRow, Proposal, Support, Verification

VOCABULARY = 10


def proposal(*draft_token_ids: int, supports: list[list[int]] | None = None) -> Proposal:
    ids = [[token_id] for token_id in draft_token_ids] if supports is None else supports
    return Proposal(
        draft_token_ids=np.array(draft_token_ids, np.uint32),
        supports=tuple(Support(np.array(each, np.uint32), np.ones(len(each), np.uint16)) for each in ids),
        lost_mass=(),
        kv_len=0,
        num_cached_tokens=0,
        forward_s=0.0,
    )


def verification(*, choices: tuple[int, ...] = (), tails: tuple[int, ...] = ()) -> Verification:
    """Return a verification with choices, or with rows that name `tails` as their tail tokens."""
    return Verification(
        choice_token_ids=np.array(choices, np.uint32),
        choice_probabilities=np.ones(len(choices)),
        rows=tuple(DistributionRow(np.array([WEIGHT_TOTAL], np.uint32), tail, 0.5) for tail in tails),
        logit_rows=(),
        kv_len=0,
        num_cached_tokens=0,
        forward_s=0.0,
        step_tokens=1,
    )


def refused(proposal: Proposal, *, gamma: int = 3, with_supports: bool = True) -> str:
    with pytest.raises(Internal) as error:
        check_proposal(proposal, gamma=gamma, with_supports=with_supports, vocabulary_size=VOCABULARY)
    return error.value.message


def test_a_draft_of_at_most_gamma_tokens_with_a_support_for_each_is_accepted() -> None:
    for draft in (proposal(), proposal(1), proposal(1, 2, 9), proposal(0, 2, supports=[[0, 1, 9], [2, 3]])):
        check_proposal(draft, gamma=3, with_supports=True, vocabulary_size=VOCABULARY)
    check_proposal(proposal(1, 9, supports=[]), gamma=2, with_supports=False, vocabulary_size=VOCABULARY)


def test_a_draft_longer_than_gamma_or_with_another_number_of_supports_is_refused() -> None:
    assert refused(proposal(1, 2, 3, 4)) == "the draft answered 4 tokens and 4 supports to gamma 3"
    assert refused(proposal(1, 2, supports=[[1]])) == "the draft answered 2 tokens and 1 supports to gamma 3"
    assert refused(proposal(1, 2), with_supports=False) == "the draft answered 2 tokens and 2 supports to gamma 3"


@pytest.mark.parametrize("supports", [[[0, 1, 10], [2, 3]], [[2, 3], [0, 1, 10]], [[10], [2]]])
def test_a_support_token_outside_the_vocabulary_is_refused_at_any_position(supports: list[list[int]]) -> None:
    draft = proposal(*(each[0] for each in supports), supports=supports)
    assert refused(draft) == "the draft answered token id 10, the vocabulary has 10"


def test_a_draft_token_outside_the_vocabulary_is_refused_in_rounds_without_supports() -> None:
    message = refused(proposal(1, 10, 2, supports=[]), with_supports=False)
    assert message == "the draft answered token id 10, the vocabulary has 10"


def test_a_target_that_answers_a_token_outside_the_vocabulary_is_named_in_the_error() -> None:
    for right in (verification(choices=(1, 9)), verification(tails=(3, 9))):
        check_verification(right, "t:1", vocabulary_size=VOCABULARY)
    for wrong in (verification(choices=(1, 10)), verification(tails=(10, 3))):
        with pytest.raises(Internal) as error:
            check_verification(wrong, "t:1", vocabulary_size=VOCABULARY)
        assert error.value.message == "target t:1 answered token id 10, the vocabulary has 10"


@pytest.mark.parametrize(
    "error",
    [KvMiss("gone", have=0), StaleEpoch("old"), Unavailable("dead"), ResourceExhausted("full"), Internal("broken")],
    ids=lambda error: error.reason,
)
def test_an_error_that_a_round_can_handle_is_passed_on_unchanged(error: SpecdecError) -> None:
    assert target_fault(error, "t:1") is error


def test_a_request_that_a_target_refuses_is_reported_as_internal_not_as_the_clients_fault() -> None:
    fault = target_fault(InvalidRequest("temperature is 9", field="temperature"), "t:1")
    assert type(fault) is Internal
    assert fault.message == "target t:1 refused a verification: INVALID_ARGUMENT temperature is 9"
    assert fault.field == ""
