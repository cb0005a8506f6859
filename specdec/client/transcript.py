"""What one stream has received so far, and how to ask for the rest: the pure half of a stream that resumes itself.

Not here: calls, clocks, retries (`async_client`, `sync_client` and `recovery`), so that both clients share one
account of which tokens are whose.
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
from specdec.errors import Internal
from specdec.v1 import coordinator_pb2 as pb


class Transcript:
    """The output of one request, chunk by chunk.

    Invariant: tokens [first, num_tokens) were handed to the caller exactly once each, in order; `first` is 0 unless
    the request itself resumes an earlier one.
    """

    def __init__(self, request: pb.GenerateRequest, sizes: SessionSizes) -> None:
        """
        Args:
            request: carries a session id and, unless it resumes, a request id of the client's own.
            sizes: told what the session holds.
        """
        self.request = request
        self.request_id = request.request_id
        self.target_fingerprint = ""
        """Of the target model, once the server has begun."""
        self.target_changed = False
        self._sizes = sizes
        self._first = request.resume_from
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._details: list[TokenDetail] = []
        self._num_prompt_tokens = 0
        self._finished: pb.Finished | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens the caller holds, those before a resumption included."""
        return self._first + len(self._token_ids)

    @property
    def finished(self) -> bool:
        return self._finished is not None

    def next_request(self) -> pb.GenerateRequest:
        """The message to send now: the original until a token has arrived, then one that resumes after the last.

        The original again is safe, because its request id makes it join or repeat what it began. Resuming before the
        first token would not be: the server may not have stored this request yet, and "the last request" of the
        session would be an earlier one.
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
        """Takes the next message of the server.

        Returns:
            A chunk to hand to the caller, or None where there is nothing new to hand over.

        Raises:
            Internal: the server answered another request, skipped tokens, or answered with half of a chunk that the
                caller already has.
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
            self._num_prompt_tokens = response.started.num_prompt_tokens
            self.target_fingerprint = response.started.target_fingerprint
            self.target_changed = response.started.target_changed
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
        return chunk

    def completion(self) -> Completion:
        """The whole output; of a stream that was left before its end, what came of it, without the server's figures."""
        finished = self._finished
        return Completion(
            session_id=self.request.session_id,
            request_id=self.request_id,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=read_finish_reason(finished.reason) if finished else CANCELLED,
            usage=read_usage(finished.usage) if finished else Usage(self._num_prompt_tokens, self.num_tokens, 0),
            stats=read_stats(finished.stats) if finished else GenerationStats.nothing(),
            details=tuple(self._details),
            target_fingerprint=self.target_fingerprint,
            target_changed=self.target_changed,
        )
