"""Decoding of single replies, as if each came in a separate frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from specdec.contract.errors import Internal
from specdec.contract.types import Proposal, ProposeRequest, Verification, VerifyRequest
from specdec.rpc import proposals, verifications
from specdec.v1 import draft_pb2, target_pb2

AnswerT = TypeVar("AnswerT")


def decode_proposal(message: draft_pb2.Proposal, request: ProposeRequest) -> Proposal:
    """Return the decoded reply. Raises Internal if the reply is malformed."""
    return _only(proposals.decode_proposals([message], [request]))


def decode_verification(message: target_pb2.Verification, request: VerifyRequest) -> Verification:
    """Return the decoded reply. Raises Internal if the reply is malformed."""
    return _only(verifications.decode_verifications([message], [request]))


def _only(answers: Sequence[AnswerT | Internal]) -> AnswerT:
    (answer,) = answers
    if isinstance(answer, Internal):
        raise answer
    return answer
