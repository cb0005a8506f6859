"""The codec preserves every field, and refuses malformed messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.contract.errors import Internal, InvalidRequest
from specdec.contract.types import (
    MAX_SUPPORT,
    WEIGHT_TOTAL,
    DrawRule,
    Proposal,
    ProposeRequest,
    SamplingFilters,
    ScoreRequest,
    Support,
    VerifyRequest,
)
from specdec.core.packed import PackedSupports
from specdec.core.random import DrawKey
from specdec.core.reference import distribution_row
from specdec.core.rejection import residual_weights, verify_rejection
from specdec.rpc import codec, proposals, verifications
from specdec.rpc.arrays import decode_supports, encode_supports
from specdec.v1 import common_pb2, draft_pb2, target_pb2
from tests.support.arithmetic_engines import (
    CONTEXT,
    GREEDY,
    MAX_GAMMA,
    VOCABULARY,
    ArithmeticDraft,
    ArithmeticTarget,
    make_round,
    support_of,
)
from tests.support.links import decode_proposal, decode_verification

LIMITS = ArithmeticTarget().info()
COUPLED = DrawRule.COUPLED


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal, with the contents of dataclasses, tuples and arrays."""
    if is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, field.name), getattr(right, field.name)) for field in fields(left)
        )
    if isinstance(left, Sequence) and not isinstance(left, str | bytes):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and bool(np.array_equal(left, right))
    return bool(left == right)


def verify_request(
    num_draft_tokens: int = 4, *, num_logprobs: int | None = None, **round_options: Any
) -> VerifyRequest:
    round_ = make_round(**round_options)
    drafts = np.arange(10, 10 + num_draft_tokens, dtype=np.uint32)
    with_supports = round_.draw_rule is DrawRule.DISTRIBUTION and not round_.filters.is_greedy
    supports = tuple(support_of(int(token), 3 + index).token_ids for index, token in enumerate(drafts))
    return VerifyRequest(round_, drafts, supports if with_supports else (), num_logprobs)


def test_every_field_of_a_propose_request_survives_the_wire() -> None:
    filters = SamplingFilters(
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={3: -100.0, 999: 2.5},
        min_new_tokens=7,
        end_token_ids=(2, 9),
    )
    request = ProposeRequest(make_round(filters=filters, start=32, draw_rule=COUPLED), gamma=5)
    message = codec.encode_propose_request(request, 17)
    assert message.call_id == 17
    assert same(codec.decode_propose_request(message, LIMITS), request)


@pytest.mark.parametrize("num_logprobs", [None, 0, 3])
@pytest.mark.parametrize("round_options", [{}, {"filters": GREEDY}, {"draw_rule": COUPLED}])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 5])
async def test_verify_requests_and_their_answers_survive_the_wire(
    num_draft_tokens: int, round_options: dict[str, Any], num_logprobs: int | None
) -> None:
    request = verify_request(num_draft_tokens, num_logprobs=num_logprobs, **round_options)
    assert same(codec.decode_verify_request(codec.encode_verify_request(request, 1), LIMITS), request)
    verification = await ArithmeticTarget().verify(request)
    message = target_pb2.Verification.FromString(verifications.encode_verification(verification, 9).SerializeToString())
    assert message.call_id == 9
    assert same(decode_verification(message, request), verification)


@pytest.mark.parametrize("round_options", [{}, {"filters": GREEDY}, {"draw_rule": COUPLED}])
async def test_proposals_survive_the_wire(round_options: dict[str, Any]) -> None:
    request = ProposeRequest(make_round(**round_options), gamma=4)
    proposal = await ArithmeticDraft().propose(request)
    message = draft_pb2.Proposal.FromString(proposals.encode_proposal(proposal, 2).SerializeToString())
    assert same(decode_proposal(message, request), proposal)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sets(st.integers(0, 2**32 - 1), min_size=1, max_size=80), max_size=9))
def test_any_supports_survive_the_wire(supports: list[set[int]]) -> None:
    ids = [np.array(sorted(support), dtype=np.uint32) for support in supports]
    message = encode_supports(ids) if ids else common_pb2.Supports()
    (decoded,) = decode_supports([message], [len(ids)])
    assert all(map(np.array_equal, decoded, ids))


def test_a_round_of_gamma_4_with_full_supports_stays_within_4_kilobytes() -> None:
    generator = np.random.default_rng(1)
    supports = [np.sort(generator.choice(151_936, 64, replace=False)).astype(np.uint32) for _ in range(4)]
    ids = encode_supports(supports).ByteSize()
    weights = 4 * 64 * 2
    laws = 4 * 65 * 4
    assert 2 * ids + weights + laws < 3500


def broken_requests() -> list[tuple[str, str, VerifyRequest | Any]]:
    good = codec.encode_verify_request(verify_request(), 1)

    def broken(**changes: Any) -> target_pb2.VerifyRequest:
        message = target_pb2.VerifyRequest.FromString(good.SerializeToString())
        for path, value in changes.items():
            part: Any = message
            *parents, name = path.split("__")
            for parent in parents:
                part = getattr(part, parent)
            if isinstance(value, list):
                del getattr(part, name)[:]
                getattr(part, name).extend(value)
            else:
                setattr(part, name, value)
        return message

    nan = float("nan")
    bias = broken()
    bias.round.law.logit_bias[VOCABULARY] = 1.0
    infinite_bias = broken()
    infinite_bias.round.law.logit_bias[1] = -float("inf")
    return [
        ("round.session_id", "bytes", broken(round__session_id="")),
        ("round.session_id", "256", broken(round__session_id="x" * 300)),
        ("round.prefix_hash", "16", broken(round__prefix_hash=b"123")),
        ("round.token_ids", "one token", broken(round__token_ids=[])),
        ("round.token_ids", str(VOCABULARY), broken(round__token_ids=[1, VOCABULARY])),
        ("round.token_ids", str(CONTEXT), broken(round__start=CONTEXT, round__output_start=0)),
        ("round.output_start", "beyond", broken(round__output_start=4000)),
        ("round.draw_rule", "LAW", broken(round__draw_rule=0)),
        ("round.law.temperature", "0", broken(round__law__temperature=nan)),
        ("round.law.temperature", "0", broken(round__law__temperature=-1.0)),
        ("round.law.top_p", "(0, 1]", broken(round__law__top_p=1.5)),
        ("round.law.min_p", "[0, 1)", broken(round__law__min_p=1.0)),
        ("round.law.frequency_penalty", "finite", broken(round__law__frequency_penalty=nan)),
        ("round.law.repetition_penalty", "above 0", broken(round__law__repetition_penalty=-1.0)),
        ("round.law.presence_penalty", "finite", broken(round__law__presence_penalty=float("inf"))),
        ("round.law.logit_bias", str(VOCABULARY), bias),
        ("round.law.end_token_ids", str(VOCABULARY), broken(round__law__end_token_ids=[1, VOCABULARY])),
        ("round.law.logit_bias", "finite", infinite_bias),
        ("draft_token_ids", str(MAX_GAMMA), broken(draft_token_ids=list(range(MAX_GAMMA + 1)))),
        ("draft_token_ids", str(VOCABULARY), broken(draft_token_ids=[1, 2, 3, VOCABULARY])),
        ("supports", "expected", broken(draft_token_ids=[1])),
        ("supports", "add up", broken(supports__sizes=[3, 4, 5, 7])),
        ("supports", "add up", broken(supports__sizes=[0, 7, 5, 6])),
        ("supports", "ascending", broken(supports__id_deltas=[0] * 18)),
        ("supports", str(VOCABULARY), broken(supports__id_deltas=[900] * 18)),
        ("supports", "32 bits", broken(supports__id_deltas=[2**32 - 1] * 18)),
        ("num_logprobs", "at most", broken(num_logprobs=100_000)),
    ]


@pytest.mark.parametrize(("field", "words", "message"), broken_requests())
def test_a_malformed_request_is_refused_naming_field_and_limit(field: str, words: str, message: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_verify_request(message, LIMITS)
    assert caught.value.field == field
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("field", "words", "start", "scored"),
    [
        ("token_ids", "at least one", 0, []),
        ("token_ids", "the limit is 64", 0, [3] * 65),
        ("token_ids", str(VOCABULARY), 0, [VOCABULARY]),
        ("round.start", "must be 0", 5, [3]),
    ],
)
def test_what_is_no_span_of_committed_tokens_is_refused(field: str, words: str, start: int, scored: list[int]) -> None:
    message = codec.encode_score_request(ScoreRequest(make_round(), np.array(scored, dtype=np.uint32)))
    message.round.start = start
    with pytest.raises(InvalidRequest, match=words) as caught:
        codec.decode_score_request(message, LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize("gamma", [0, MAX_GAMMA + 1])
def test_a_gamma_outside_the_limits_is_refused(gamma: int) -> None:
    message = codec.encode_propose_request(ProposeRequest(make_round(), gamma), 1)
    with pytest.raises(InvalidRequest, match=f"gamma: must be 1 to {MAX_GAMMA}"):
        codec.decode_propose_request(message, LIMITS)


def test_a_session_beyond_the_context_is_refused_with_the_reason() -> None:
    message = codec.encode_verify_request(verify_request(4, num_tokens=CONTEXT - 3), 1)
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_verify_request(message, LIMITS)
    assert caught.value.reason == "CONTEXT_TOO_LONG"


async def test_a_malformed_proposal_is_the_replicas_fault() -> None:
    request = ProposeRequest(make_round(), gamma=3)
    good = proposals.encode_proposal(await ArithmeticDraft().propose(request), 1)

    def broken(**changes: Any) -> draft_pb2.Proposal:
        message = draft_pb2.Proposal.FromString(good.SerializeToString())
        for name, value in changes.items():
            if isinstance(value, list):
                del getattr(message, name)[:]
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        return message

    for message, words in [
        (broken(draft_token_ids=[1, 2, 3, 4]), "gamma"),
        (broken(draft_token_ids=[3, 4]), "supports"),
        (broken(draft_token_ids=[3, 4, 6]), "not in its own support"),
        (broken(weights=b"123"), "weights has 3 bytes"),
        (broken(weights=bytes(24)), "weight 0"),
        (broken(lost_mass=[0.5]), "lost_mass"),
    ]:
        with pytest.raises(Internal, match=words):
            decode_proposal(message, request)


async def test_a_malformed_verification_is_the_replicas_fault() -> None:
    request = verify_request(3, num_logprobs=2)
    verification = await ArithmeticTarget().verify(request)
    short = replace(verification, rows=verification.rows[1:])
    no_logits = replace(verification, logit_rows=())
    heavy = replace(verification.rows[0], weights=verification.rows[0].weights + np.uint32(1))
    for answer, words in [
        (short, "weights has"),
        (no_logits, "no logits"),
        (replace(verification, rows=(heavy, *verification.rows[1:])), "sum to"),
    ]:
        with pytest.raises(Internal, match=words):
            decode_verification(verifications.encode_verification(answer, 1), request)
    extra_tail = verifications.encode_verification(verification, 1)
    extra_tail.tail_token_ids.append(5)
    with pytest.raises(Internal, match="tail tokens"):
        decode_verification(extra_tail, request)
    greedy = verify_request(3, filters=GREEDY)
    with pytest.raises(Internal, match="0 choices for 4 positions"):
        decode_verification(verifications.encode_verification(verification, 1), greedy)


def test_a_support_too_large_for_the_integer_rule_is_the_replicas_fault() -> None:
    request = ProposeRequest(make_round(), gamma=1)

    def answer(num_entries: int) -> draft_pb2.Proposal:
        ids = np.arange(num_entries, dtype=np.uint32)
        support = Support(ids, np.full(num_entries, 65_535, dtype=np.uint16))
        return proposals.encode_proposal(Proposal(ids[:1], (support,), (0.0,), 1, 0, 0.0), 1)

    largest = decode_proposal(answer(MAX_SUPPORT), request).supports[0]
    certain = distribution_row(np.eye(1, MAX_SUPPORT)[0], largest.token_ids, 0.5)
    # p is token 0 alone, so the residual is exactly what q lacks of it.
    residual = residual_weights(largest, certain)
    assert residual[0] == WEIGHT_TOTAL * 65_535 * (MAX_SUPPORT - 1)
    assert not residual[1:].any()
    with pytest.raises(Internal, match="more than 32768 entries"):
        decode_proposal(answer(MAX_SUPPORT + 1), request)


def test_engine_info_survives_the_wire() -> None:
    assert codec.decode_engine_info(codec.encode_engine_info(LIMITS)) == LIMITS


async def test_the_replies_of_a_frame_read_together_are_those_read_one_by_one() -> None:
    requests = [
        ProposeRequest(make_round(f"s{n}", num_tokens=3 + n, filters=GREEDY if n == 2 else None), 1 + n % 4)
        for n in range(6)
    ]
    proposal_messages = [proposals.encode_proposal(await ArithmeticDraft().propose(request), 1) for request in requests]
    drafts = proposals.decode_proposals(proposal_messages, requests)
    assert all(map(same, drafts, map(decode_proposal, proposal_messages, requests)))
    asked = [
        VerifyRequest(request.position, draft.draft_token_ids, tuple(support.token_ids for support in draft.supports))
        for request, draft in zip(requests, drafts, strict=True)
    ]
    answers = [verifications.encode_verification(await ArithmeticTarget().verify(request), 1) for request in asked]
    together = verifications.decode_verifications(answers, asked)
    assert all(map(same, together, map(decode_verification, answers, asked)))
    for request, draft, answer in zip(requests, drafts, together, strict=True):
        if not draft.supports:
            continue
        for seed in range(20):
            key = DrawKey(seed, 0, request.position.committed_len)
            packed = verify_rejection(draft.draft_token_ids, draft.supports, answer.rows, key)
            assert packed == verify_rejection(draft.draft_token_ids, tuple(draft.supports), tuple(answer.rows), key)


async def test_a_malformed_reply_of_a_frame_fails_alone() -> None:
    requests = [ProposeRequest(make_round(f"s{n}"), gamma=3) for n in range(4)]
    proposal_messages = [proposals.encode_proposal(await ArithmeticDraft().propose(request), 1) for request in requests]
    proposal_messages[1].weights = bytes(len(proposal_messages[1].weights))
    proposal_messages[2].draft_token_ids[0] = 999
    answers = proposals.decode_proposals(proposal_messages, requests)
    assert [isinstance(answer, Internal) for answer in answers] == [False, True, True, False]
    assert same(answers[3], decode_proposal(proposal_messages[3], requests[3]))


async def test_supports_are_forwarded_in_the_message_they_came_in() -> None:
    request = ProposeRequest(make_round(), gamma=3)
    message = proposals.encode_proposal(await ArithmeticDraft().propose(request), 1)
    draft = decode_proposal(message, request)
    assert isinstance(draft.supports, PackedSupports)
    forwarded = VerifyRequest(request.position, draft.draft_token_ids, draft.supports.ids)
    assert codec.encode_verify_request(forwarded, 1).supports == message.supports
