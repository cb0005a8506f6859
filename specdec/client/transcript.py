"""Tokens that one stream has received, and the request that continues it: the state of a stream without its calls.

Both clients share it. They make the calls, and `recovery` decides on retries.
"""

from __future__ import annotations

from specdec.client.results import (
    CANCELLED,
    Chunk,
    Completion,
    GenerationStats,
    TokenDetail,
    Usage,
    read_chunk,
    read_finish_reason,
    read_stats,
    read_usage,
)
from specdec.client.sessions import SessionSizes
from specdec.client.tools import calls_of, reasoning_of
from specdec.contract.errors import Internal, PartialOutput, Unsupported
from specdec.contract.tools import OutputPart
from specdec.v1 import coordinator_pb2 as pb


class Transcript:
    """Output of one request, chunk by chunk.

    Invariant: each of the tokens [first, num_tokens) was returned to the caller once, in order. `first` is 0 unless
    the request itself resumes an earlier one.
    """

    def __init__(self, request: pb.GenerateRequest, sizes: SessionSizes) -> None:
        """
        Args:
            request: request with a session id and, unless it resumes, a request id that the client made.
            sizes: record that gets the session's token count.
        """
        self.request = request
        self.request_id = request.request_id
        self.target_fingerprint = ""
        """Fingerprint of the target model; "" until the server has begun."""
        self.target_changed = False
        self.adapter = ""
        """Name of the target model's adapter; "" for none, and until the server has begun."""
        self.constraint_warnings: tuple[str, ...] = ()
        self._sizes = sizes
        self._first = request.resume_from
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._details: list[TokenDetail] = []
        self._parts: list[OutputPart] = []
        self.num_prompt_tokens = 0
        """Number of tokens before the output, once the server has begun."""
        self._finished: pb.Finished | None = None

    @property
    def num_tokens(self) -> int:
        """Number of output tokens that the caller holds, including those before a resumption."""
        return self._first + len(self._token_ids)

    @property
    def finished(self) -> bool:
        return self._finished is not None

    def next_request(self) -> pb.GenerateRequest:
        """Return the message of the next attempt: the original one until a token has arrived, then a resumption.

        Sending the original again is safe, because its request id joins what it began. Resuming before the first token
        is not: the server may not have stored this request yet, and would resume the session's previous one.
        """
        if not self._token_ids:
            return self.request
        return pb.GenerateRequest(
            session_id=self.request.session_id,
            request_id=self.request_id,
            return_provenance=self.request.return_provenance,
            resume_from=self.num_tokens,
        )

    def accept(self, response: pb.GenerateResponse) -> Chunk | None:
        """Record the next message of the server.

        Returns:
            The chunk to return to the caller, or None if the message has no new tokens.

        Raises:
            Internal: the message belongs to another request, skips tokens, or splits a chunk that the caller has.
            Unsupported: the server ignores the request's adapter.
        """
        event = response.WhichOneof("event")
        if event == "finished":
            self._finished = response.finished
            usage = response.finished.usage
            num_tokens = usage.num_prompt_tokens + usage.num_output_tokens
            self._sizes.learn(self.request.session_id, self.request_id, num_tokens)
            return None
        if event == "started":
            request_id = response.started.request_id
            if self.request_id and request_id not in ("", self.request_id):
                raise Internal(f"the server answered request {request_id!r}, not {self.request_id!r}")
            self.request_id = request_id
            self.num_prompt_tokens = response.started.num_prompt_tokens
            self.target_fingerprint = response.started.target_fingerprint
            self.target_changed = response.started.target_changed
            self.adapter = response.started.adapter
            if self.request.adapter not in ("", self.adapter):
                raise Unsupported("the coordinator is older than adapters and ignores them: update it", field="adapter")
            self.constraint_warnings = tuple(response.started.constraint_warnings)
            self._sizes.begin(self.request.session_id, self.request_id)
        if event != "tokens":
            return None
        chunk = read_chunk(response.tokens)
        end = chunk.index + len(chunk.token_ids)
        if chunk.index < self.num_tokens and end <= self.num_tokens:
            return None
        if chunk.index != self.num_tokens:
            raise Internal(f"the server sent output tokens {chunk.index} to {end} where {self.num_tokens} was next")
        self._token_ids.extend(chunk.token_ids)
        self._texts.append(chunk.text)
        self._details.extend(chunk.details)
        self._parts.extend(chunk.parts)
        return chunk

    def partial(self) -> PartialOutput:
        """Return the tokens received so far, for the error that ended the stream."""
        return PartialOutput(self.request.session_id, self.num_tokens, "".join(self._texts), tuple(self._token_ids))

    def completion(self) -> Completion:
        """Return the output. If the stream was closed before its end, the part received, without the server's stats."""
        finished = self._finished
        return Completion(
            session_id=self.request.session_id,
            request_id=self.request_id,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=read_finish_reason(finished.reason) if finished else CANCELLED,
            usage=read_usage(finished.usage) if finished else Usage(self.num_prompt_tokens, self.num_tokens, 0),
            stats=read_stats(finished.stats) if finished else GenerationStats.nothing(),
            details=tuple(self._details),
            target_fingerprint=self.target_fingerprint,
            target_changed=self.target_changed,
            constraint_warnings=self.constraint_warnings,
            tool_calls=calls_of(self._parts),
            reasoning=reasoning_of(self._parts),
            is_named_call=finished is not None and finished.is_named_call,
            adapter=self.adapter,
        )
