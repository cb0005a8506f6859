"""/v1/sessions/{id}: a session's record, its deletion, and the resumption of its last stream."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from gateway.answers import ANSWERS, ERRORS, event_stream, json_response
from gateway.chunks import ChatChunks, ChunkEncoder, ChunkOptions, CompletionChunks
from gateway.context import Gateway, wants_event_ids
from gateway.outputs import resumed
from gateway.schemas.common import whole_number
from specdec.client import Session
from specdec.contract.errors import InvalidRequest

#: Encoders of a resumed stream, by the object whose chunks it sends.
_ENCODERS: dict[str, type[ChunkEncoder]] = {"chat.completion": ChatChunks, "text_completion": CompletionChunks}
_LAST_EVENT_ID = "last-event-id"


def router(gateway: Gateway) -> APIRouter:
    """Return the routes of sessions."""
    routes = APIRouter(tags=["sessions"])

    @routes.get("/v1/sessions/{session_id}", response_model=None, responses=ANSWERS)
    async def retrieve_session(
        session_id: str,
        request: Request,
        object: Annotated[
            Literal["chat.completion", "text_completion"], Query(description="Form of the chunks of a stream.")
        ] = "chat.completion",
        return_provenance: Annotated[
            bool, Query(description="Tell for every token of a stream which part of the system it came from.")
        ] = False,
    ) -> Response:
        """Return a session's record, or its last output as a stream.

        With the header `Accept: text/event-stream`, stream the session's last output instead: from its beginning, or
        after the event that `Last-Event-ID` names. An output that was interrupted is continued.
        """
        client = gateway.client(request)
        if not wants_event_ids(request):
            return json_response(_record(await client.get_session(session_id)))
        model = (await gateway.upstream.served()).names[0]
        num_received = _num_received(session_id, request.headers.get(_LAST_EVENT_ID, ""))
        options = ChunkOptions(
            f"resumed-{session_id}",
            model,
            int(time.time()),
            has_provenance=return_provenance,
            has_event_ids=True,
            num_received=num_received,
        )
        stream = client.resume(session_id, num_received, provenance=True)
        return event_stream(gateway, _ENCODERS[object](options), resumed(stream, gateway.metrics))

    @routes.delete("/v1/sessions/{session_id}", response_model=None, responses=ERRORS)
    async def delete_session(session_id: str, request: Request) -> Response:
        """Delete a session and free what it holds. An unknown id is accepted."""
        await gateway.client(request).delete_session(session_id)
        return json_response({"id": session_id, "object": "session.deleted", "deleted": True})

    return routes


def _num_received(session_id: str, event_id: str) -> int:
    """Return the number of output tokens up to an event `SESSION:INDEX`; 0 without one. Raises InvalidRequest."""
    if not event_id:
        return 0
    named, _, index = event_id.rpartition(":")
    num_received = whole_number(index, 1 << 32)
    if named != session_id or num_received is None:
        raise InvalidRequest(
            f"Last-Event-ID: must be {session_id[:128]}:INDEX, got {event_id[:128]!r}", field="Last-Event-ID"
        )
    return num_received


def _record(session: Session) -> dict[str, Any]:
    return {
        "id": session.session_id,
        "object": "session",
        "status": session.status,
        "num_tokens": session.num_tokens,
        "turn": session.turn,
        "expires_in_s": session.expires_in_s,
        "stats": asdict(session.stats),
    }
