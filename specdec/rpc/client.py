"""The links to a draft replica and to a target replica: which calls each has, and how they are encoded.

`specdec.rpc.link` has what both share. A round's call comes from `coordinator/round/session_calls`; a run is an
`specdec.rpc.open_run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from specdec.access.tls import Tls
from specdec.contract.errors import Internal
from specdec.contract.types import Proposal, ProposeRequest, Verification, VerifyRequest
from specdec.rpc import codec, proposals, verifications
from specdec.rpc.handshake import Metadata
from specdec.rpc.link import Link
from specdec.rpc.open_calls import CallTimeout, WireStats
from specdec.rpc.open_run import OpenRun
from specdec.rpc.replica_stream import Replies, RunCall, Step
from specdec.v1 import draft_pb2, target_pb2


class DraftLink(Link[ProposeRequest, Proposal]):
    """The link to one draft replica."""

    _stream_method = "/specdec.v1.DraftService/Propose"
    _reply_type = draft_pb2.Proposal
    _frame_type = draft_pb2.ProposalFrame

    async def propose(
        self,
        request: ProposeRequest,
        wire: WireStats | None = None,
        *,
        model: str = "",
        call_timeout: CallTimeout | None = None,
    ) -> Proposal:
        """Request draft tokens. Idempotent by (session, epoch, round) and digest, so the call may be repeated.

        Cancelling the call disturbs no other call; the replica may still finish it.

        Args:
            request: the round and the number of tokens.
            wire: what the call costs on the wire is added here, however the call ends.
            model: fingerprint of the only model that may answer; "": any.
            call_timeout: None: wait without limit.

        Raises:
            TimeoutError: `call_timeout` has passed.
            Unavailable: the replica cannot be reached, broke off or serves another model; raised at once for every
                call that is pending on it.
            Internal: its answer does not fit the request.
            SpecdecError: the error that the replica answered (KvMiss, StaleEpoch, ResourceExhausted, ...).
        """
        return await self._call(request, wire, model=model, call_timeout=call_timeout)

    def _read_frame(self, frame: bytes) -> Replies:
        return Replies([(item, item.ByteSize()) for item in draft_pb2.ProposalFrame.FromString(frame).proposals])

    def _encode(self, request: ProposeRequest, call_id: int) -> draft_pb2.ProposeRequest:
        return codec.encode_propose_request(request, call_id)

    def _decode(
        self, messages: list[draft_pb2.Proposal], requests: list[ProposeRequest]
    ) -> Sequence[Proposal | Internal]:
        return proposals.decode_proposals(messages, requests)


class TargetLink(Link[VerifyRequest, Verification]):
    """The link to one target replica."""

    _stream_method = "/specdec.v1.TargetService/Verify"
    _reply_type = target_pb2.Verification
    _frame_type = target_pb2.VerificationFrame

    async def verify(self, request: VerifyRequest, wire: WireStats | None = None, *, model: str = "") -> Verification:
        """Request target probabilities at the draft positions.

        Idempotency, byte accounting, model pinning, cancellation and errors are as in `DraftLink.propose`.
        """
        return await self._call(request, wire, model=model)

    def open_run(self, request: VerifyRequest, wire: WireStats, *, model: str = "") -> OpenRun:
        """Begin a run; model pinning and byte accounting are as in `DraftLink.propose`.

        Raises:
            InvalidRequest: the request is larger than the replica's limit.
        """
        return OpenRun(partial(self._begin_run, request, wire, model))

    def _begin_run(self, request: VerifyRequest, wire: WireStats, model: str) -> RunCall:
        stream = self._choose_stream(model)
        call_id = stream.next_call_id()
        return stream.begin_run(call_id, request, self._encode_item(request, call_id), wire)

    def _read_frame(self, frame: bytes) -> Replies:
        message = target_pb2.VerificationFrame.FromString(frame)
        replies = self._sort([(item, item.ByteSize()) for item in message.verifications])
        steps = [*replies.steps]
        for run_step in message.steps:
            share = run_step.ByteSize() // max(1, len(run_step.call_ids))
            for call_id, token_id, position, probability in verifications.read_steps(run_step):
                read = partial(_step_of, token_id, position, probability, run_step)
                steps.append(Step(call_id, share, read))
        return Replies(replies.items, steps)

    def _sort(self, items: list[tuple[Any, int]]) -> Replies:
        if not any(item.goes_on for item, _ in items):
            return Replies(items)
        steps = [Step(item.call_id, size, partial(self._read_step, item)) for item, size in items if item.goes_on]
        return Replies([(item, size) for item, size in items if not item.goes_on], steps)

    def _read_step(self, item: target_pb2.Verification, request: VerifyRequest) -> Verification | Internal:
        (answer,) = self._decode([item], [request])
        return answer

    def _encode(self, request: VerifyRequest, call_id: int) -> target_pb2.VerifyRequest:
        return codec.encode_verify_request(request, call_id)

    def _decode(
        self, messages: list[target_pb2.Verification], requests: list[VerifyRequest]
    ) -> Sequence[Verification | Internal]:
        return verifications.decode_verifications(messages, requests)


def _step_of(
    token_id: int, position: int, probability: float, message: target_pb2.RunStep, request: VerifyRequest
) -> Verification:
    return verifications.verification_of_step(request, token_id, position, probability, message)


def open_link(role: str, address: str, *, metadata: Metadata = (), tls: Tls | None = None) -> DraftLink | TargetLink:
    """Return a link to the replica of a role (draft | target) at HOST:PORT. Nothing is dialled yet.

    Args:
        role: draft | target.
        address: HOST:PORT of the replica.
        metadata: sent with every gRPC call: the credential of the caller.
        tls: credentials of gRPC connections; None: plaintext.
    """
    return (DraftLink if role == "draft" else TargetLink)(address, metadata=metadata, tls=tls)
