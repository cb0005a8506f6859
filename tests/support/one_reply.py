"""Replies read one at a time, as if each had come in a frame of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from specdec.errors import Internal
from specdec.rpc import proposals, verifications
from specdec.types import Proposal, ProposeRequest, Verification, VerifyRequest
from specdec.v1 import draft_pb2, target_pb2

AnswerT = TypeVar("AnswerT")


def decode_proposal(message: draft_pb2.Proposal, request: ProposeRequest) -> Proposal:
    """Raises Internal when the reply broke the protocol."""
    return _only(proposals.decode_proposals([message], [request]))


def decode_verification(message: target_pb2.Verification, request: VerifyRequest) -> Verification:
    """Raises Internal when the reply broke the protocol."""
    return _only(verifications.decode_verifications([message], [request]))


def _only(answers: Sequence[AnswerT | Internal]) -> AnswerT:
    (answer,) = answers
    if isinstance(answer, Internal):
        raise answer
    return answer
