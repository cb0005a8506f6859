"""A real gRPC `CoordinatorService` whose Generate calls follow a script, for tests of clients.

Not the coordinator: it speaks the proto and nothing else, so that tests choose where a stream breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc

from specdec.contract.errors import SpecdecError
from specdec.rpc.status_mapping import to_status, trailing_metadata
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceServicer, add_CoordinatorServiceServicer_to_server

Event = pb.GenerateResponse | SpecdecError
Script = Callable[[pb.GenerateRequest], list[Event]]


def started(request: pb.GenerateRequest) -> pb.GenerateResponse:
    return pb.GenerateResponse(started=pb.Started(session_id=request.session_id, request_id=request.request_id, seed=1))


def tokens(index: int, token_ids: list[int], sources: str = "") -> pb.GenerateResponse:
    """A chunk whose token n reads "<n>"; `sources` has a letter of acbt a token."""
    letters = {"a": 1, "c": 2, "b": 3, "t": 4}
    details = [
        pb.TokenDetail(source=letters[letter], p=0.5, text=f"<{token}>")
        for letter, token in zip(sources, token_ids, strict=bool(sources))
    ]
    text = "".join(f"<{token}>" for token in token_ids)
    return pb.GenerateResponse(tokens=pb.TokenChunk(index=index, token_ids=token_ids, text=text, details=details))


def finished(num_output_tokens: int, reason: int = pb.FINISH_REASON_LENGTH) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        finished=pb.Finished(
            reason=reason,
            usage=pb.Usage(num_prompt_tokens=3, num_output_tokens=num_output_tokens),
            stats=pb.GenerationStats(num_rounds=2, num_draft_tokens=4, num_accepted_tokens=2, e2el_s=0.5, wire_bytes=9),
        )
    )


@dataclass
class ScriptedCoordinator(CoordinatorServiceServicer):
    """Call n of Generate follows `scripts[n]`, the last one ever after; an error in a script ends the call with it."""

    scripts: list[Script]
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    promoted: list[str] = field(default_factory=list)
    target_shares: list[tuple[str, float]] = field(default_factory=list)
    """Fingerprint and share of each call of Promote for a target model."""
    authorizations: list[str] = field(default_factory=list)
    """What each call of Generate, GetInfo, Promote and DeleteSession had as `authorization`; "" for none."""
    served: pb.GetInfoResponse = field(default_factory=pb.GetInfoResponse)
    """What GetInfo answers."""
    tokenize_error: SpecdecError | None = None
    """What Tokenize answers instead of token ids."""
    num_tokens: Callable[[pb.TokenizeRequest], int] | None = None
    """How many token ids Tokenize answers; None: two, the text's length and the number of messages."""

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        self.requests.append(request)
        self._note_authorization(context)
        script = self.scripts[min(len(self.requests), len(self.scripts)) - 1]
        for event in script(request):
            if isinstance(event, SpecdecError):
                refuse(event, context)
            yield event

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:  # noqa: N802
        if self.tokenize_error is not None:
            refuse(self.tokenize_error, context)
        if self.num_tokens is not None:
            return pb.TokenizeResponse(token_ids=range(self.num_tokens(request)))
        return pb.TokenizeResponse(token_ids=[len(request.text), len(request.messages.messages)])

    def GetInfo(self, request: pb.GetInfoRequest, context: grpc.ServicerContext) -> pb.GetInfoResponse:  # noqa: N802
        self._note_authorization(context)
        return self.served

    def Promote(self, request: pb.PromoteRequest, context: grpc.ServicerContext) -> pb.PromoteResponse:  # noqa: N802
        if request.HasField("target_fingerprint"):
            self.target_shares.append((request.target_fingerprint, request.share))
            return pb.PromoteResponse(target_models=self.served.target_models)
        self.promoted.append(request.draft_pool)
        self._note_authorization(context)
        return pb.PromoteResponse()

    def DeleteSession(  # noqa: N802
        self, request: pb.DeleteSessionRequest, context: grpc.ServicerContext
    ) -> pb.DeleteSessionResponse:
        self.deleted.append(request.session_id)
        self._note_authorization(context)
        return pb.DeleteSessionResponse()

    def _note_authorization(self, context: grpc.ServicerContext) -> None:
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization", ""))


def refuse(error: SpecdecError, context: grpc.ServicerContext) -> None:
    status = to_status(error)
    context.set_trailing_metadata(trailing_metadata(status))
    context.abort(next(code for code in grpc.StatusCode if code.value[0] == status.code), status.message)


def pool(role: str, num_replicas: int = 1, **fields: object) -> pb.PoolInfo:
    """A pool as GetInfo tells of it, with replicas role-0, role-1, ..."""
    replicas = [pb.ReplicaInfo(replica_id=f"{role}-{index}", address=f"h{index}:1") for index in range(num_replicas)]
    return pb.PoolInfo(name="default", role=role, model=f"{role}-model", replicas=replicas, **fields)


def serve(
    servicer: ScriptedCoordinator, address: str = "127.0.0.1:0", *, also: Callable[[grpc.Server], None] | None = None
) -> tuple[grpc.Server, str]:
    """Starts a server, to which `also` adds something; returns it and its endpoint."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    add_CoordinatorServiceServicer_to_server(servicer, server)
    if also is not None:
        also(server)
    port = server.add_insecure_port(address)
    server.start()
    return server, f"127.0.0.1:{port}"
