"""The blocking client: the calls of `AsyncClient` over gRPC's blocking API. Several threads may share one client.

`request` builds its messages, `results` and `transcript` read the answers, `recovery` decides on retries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import tenacity

from specdec.access.tls import Tls
from specdec.client.coordinators import Attempts, Coordinators
from specdec.client.endpoints import resolve_endpoint
from specdec.client.failures import closed
from specdec.client.identity import Identity, trace_metadata
from specdec.client.messages import ChatMessage
from specdec.client.recovery import Budgets, Recovery, ended_early
from specdec.client.request import (
    GenerateOptions,
    Input,
    build_detokenize_request,
    build_message,
    build_request,
    build_tokenize_request,
)
from specdec.client.results import Chunk, Completion, Session, read_session
from specdec.client.server_info import (
    Promotion,
    ServerInfo,
    TargetModel,
    read_promotion,
    read_server_info,
    read_target_models,
)
from specdec.client.transcript import Transcript
from specdec.client.transport import require_private_key, resolve_tls
from specdec.contract.errors import SpecdecError
from specdec.v1 import coordinator_pb2 as pb


class Stream(Iterator[Chunk]):
    """One output, streamed. Iterate it or call `result()`, and end it by `with`, `close()` or its last chunk.

    After a lost connection, coordinator or lease the stream reconnects and resumes after the last token it returned, so
    that no token is lost or repeated. A failure ends it: the error has the output so far in `error.partial`. One thread
    at a time may read a stream; any thread may close it.
    """

    def __init__(self, attempts: Attempts, transcript: Transcript, recovery: Recovery) -> None:
        self._attempts = attempts
        self._transcript = transcript
        self._recovery = recovery
        self._retrying = tenacity.Retrying(**self._recovery.tenacity_options())
        self._call: Any = None
        self._closed = False
        self._failure: SpecdecError | None = None
        """The error that ended the stream, until `result()` has raised it."""

    @property
    def session_id(self) -> str:
        return self._transcript.request.session_id

    @property
    def request_id(self) -> str:
        return self._transcript.request_id

    @property
    def target_fingerprint(self) -> str:
        """Fingerprint of the model that decides every token; "" before the first chunk."""
        return self._transcript.target_fingerprint

    @property
    def target_changed(self) -> bool:
        """True if another target model decided the session's previous turn; False before the first chunk."""
        return self._transcript.target_changed

    def __next__(self) -> Chunk:
        """Return the next chunk.

        Raises:
            SpecdecError: the server refused, or the interruption outlasted its budget. The stream is over then.
        """
        try:
            chunk = self._next_chunk()
        except SpecdecError as error:
            self._end()
            error.partial = self._transcript.partial()
            self._failure = error
            raise error.with_traceback(None) from None  # without the frames of the retries
        if chunk is None:
            self._end()
            raise StopIteration
        return chunk

    def result(self) -> Completion:
        """Read to the end and return the whole output; after `close()`, the part received ("cancelled").

        Raises:
            SpecdecError: the stream failed. The same error is raised once, also if iteration has raised it before; a
                further call returns the part received.
        """
        with contextlib.suppress(SpecdecError):  # kept in _failure
            for _ in self:
                pass
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure.with_traceback(None) from None
        return self._transcript.completion()

    def close(self) -> None:
        """Cancel the call unless it has ended. A thread that iterates sees the end of the stream. Idempotent."""
        self._failure = None
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next_chunk(self) -> Chunk | None:
        """Return the next chunk; None at the end. Raises SpecdecError."""
        while not (self._transcript.finished or self._closed):
            response = self._retrying(self._read)
            if response is None:
                break
            chunk = self._transcript.accept(response)
            self._recovery.answered(with_new_tokens=chunk is not None)
            if chunk is not None:
                return chunk
        return None

    def _end(self) -> None:
        self._closed = True
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _read(self) -> pb.GenerateResponse | None:
        """Return the next message; None once the stream is closed."""
        if self._closed:
            return None  # closed during the wait for a retry
        call = self._call
        if call is None:
            call = self._attempts.begin("Generate", self._transcript.next_request(), self._recovery)
            if self._closed:  # closed while a coordinator was chosen
                call.cancel()
                return None
            self._call = call
        try:
            response: pb.GenerateResponse = next(call)
            return response
        except StopIteration:
            self._call = None
            raise ended_early() from None
        except grpc.RpcError as error:
            self._call = None
            if self._closed:
                return None
            raise self._attempts.failed(error, self._recovery) from error
        except BaseException:
            self._end()
            raise


class Client(Identity):
    """Client of a coordinator. Close it or use it by `with`; afterwards every call raises ClientClosed."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        budgets: Budgets | None = None,
        timeout: float | None = None,
        api_key: str | None = None,
        tls: Tls | bool | None = None,
        insecure: bool = False,
    ) -> None:
        """Make a client that connects at its first call.

        Args:
            endpoint: HOST:PORT; A:1,B:2 with the addresses of several coordinators, or a name that resolves to them,
                over which calls are spread; or any gRPC target. None: the environment variable SPECDEC_ENDPOINT, or
                127.0.0.1:50051.
            budgets: limits on the time for which calls are retried. None: the defaults of `Budgets`.
            timeout: seconds that each call without a timeout of its own may take as a whole; None: no limit.
            api_key: key that is sent with every call; None: no key.
            tls: certificate files to encrypt with; True: trust the authorities that gRPC knows; False: plaintext; None:
                the files of SPECDEC_TLS_CA, SPECDEC_TLS_CERT and SPECDEC_TLS_KEY, or plaintext without them.
            insecure: whether the key may be sent without `tls` beyond this machine, where the network can read it.

        Raises:
            InvalidRequest: the endpoint is neither HOST:PORT nor a gRPC target, or the key has other characters than
                printable ASCII or would be sent in plaintext beyond this machine, or a certificate file cannot be used.
        """
        self._timeout = timeout
        self._budgets = budgets or Budgets()
        address, credentials = resolve_endpoint(endpoint), resolve_tls(tls)
        require_private_key(address, credentials, api_key, insecure=insecure)
        self._coordinators = Coordinators(address, credentials)
        self._identify(api_key)

    @overload
    def generate(
        self, prompt: Input = None, *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> Stream: ...

    @overload
    def generate(
        self, prompt: Input = None, *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> Completion: ...

    def generate(
        self, prompt: Input = None, *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> Stream | Completion:
        """Generate from a prompt, token ids or messages (exactly one), in a new session or the next turn of one.

        The call is idempotent: the client makes the session and request ids, so a retry joins what it began. The next
        turn of a session states how many tokens the session should hold, so that a session lost meanwhile raises
        SessionLost; `delete_session`, or `expected_session_tokens=0`, starts it anew.

        Args:
            prompt: text to append to the session, or messages, as in the option of that name.
            stream: True returns a `Stream` to iterate, False waits for the `Completion`.
            options: see `GenerateOptions`.

        Raises:
            InvalidRequest: an option does not fit the request message. The call itself raises this one.
            SpecdecError: the request failed, or took longer than its timeout; a stream raises it when it is read.
        """
        request = self._sizes.add_expected_tokens(build_request(prompt, options))
        output = self._stream(request, options.get("timeout"), options.get("traceparent"))
        if stream:
            return output
        with output:
            return output.result()

    def resume(
        self,
        session_id: str,
        resume_from: int,
        *,
        provenance: bool = False,
        timeout: float | None = None,
        traceparent: str | None = None,
    ) -> Stream:
        """Stream the session's last request from output token `resume_from` on.

        The stream raises InvalidRequest if the request has ended with fewer tokens, and SessionLost if the server holds
        fewer tokens of a request that has not ended. The call itself raises InvalidRequest for an argument that does
        not fit the request message.
        """
        request = build_message(
            pb.GenerateRequest, session_id=session_id, resume_from=resume_from, return_provenance=provenance
        )
        return self._stream(request, timeout, traceparent)

    def get_session(self, session_id: str, *, include_token_ids: bool = False) -> Session:
        """Return a session's record. Raises NotFound for an unknown session."""
        request = build_message(pb.GetSessionRequest, session_id=session_id, include_token_ids=include_token_ids)
        return read_session(self._call("GetSession", request))

    def delete_session(self, session_id: str) -> None:
        """Free the session everywhere. Idempotent; an unknown id is accepted.

        A request that runs in the session ends with `NotFound`: at once in this coordinator, after its next round in
        another one.
        """
        request = build_message(pb.DeleteSessionRequest, session_id=session_id)
        self._sizes.forget(session_id)
        self._call("DeleteSession", request)
        self._sizes.forget(session_id)  # again: a turn may have begun before the deletion

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a text or conversation as a new session would hold them."""
        return tuple(self._call("Tokenize", build_tokenize_request(text, messages, chat_template_kwargs)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, as `generate` would make it from them.

        Special tokens add no text, or their names where `skip_special_tokens` is False. Raises InvalidRequest for more
        ids than the context holds, or an id outside the vocabulary.
        """
        request = build_detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        return str(self._call("Detokenize", request).text)

    def promote(self, draft_pool: str, share: float = 1.0) -> Promotion | None:
        """Move sessions to a draft pool in steps, up to the share `share` of them; 0 ends the current promotion.

        The server rolls the promotion back if the pool gives fewer tokens per second. Raises NotFound for an unknown
        pool, Unsupported if the system does not route requests, and Forbidden where operator calls are answered at
        another address, `info().admin_address`, or the API key lacks the right.
        """
        answer = self._call("Promote", build_message(pb.PromoteRequest, draft_pool=draft_pool, share=share))
        return read_promotion(answer.promotion) if answer.HasField("promotion") else None

    def promote_target(self, fingerprint: str, share: float = 1.0) -> tuple[TargetModel, ...]:
        """Give a target model a share of the new sessions, 0 to 1, at once; return the models with their shares.

        The other models divide the rest by the number of their replicas. With fingerprint "" the share of every model
        is that of its replicas again. Sessions keep their model while it is served. Raises NotFound for an unknown
        fingerprint (see `info().target_models`), and Forbidden as `promote`.
        """
        request = build_message(pb.PromoteRequest, target_fingerprint=fingerprint, share=share)
        return read_target_models(self._call("Promote", request).target_models)

    def info(self) -> ServerInfo:
        """Return the served model, the pools and their replicas."""
        return read_server_info(self._call("GetInfo", pb.GetInfoRequest()))

    def close(self) -> None:
        """End every call and close the connection; no effect on a client that `for_tenant` returned. Idempotent."""
        if not self._is_view:
            self._coordinators.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, request: pb.GenerateRequest, timeout: float | None, traceparent: str | None) -> Stream:
        if self._coordinators.is_closed:
            raise closed()
        recovery = Recovery(self._budgets, self._timeout if timeout is None else timeout, needs_target=True)
        attempts = Attempts(self._coordinators, (*self._metadata, *trace_metadata(traceparent)))
        return Stream(attempts, Transcript(request, self._sizes), recovery)

    def _call(self, method: str, request: Any) -> Any:
        recovery = Recovery(self._budgets, self._timeout)
        attempts = Attempts(self._coordinators, self._metadata)

        def once() -> Any:
            try:
                return attempts.begin(method, request, recovery)
            except grpc.RpcError as error:
                raise attempts.failed(error, recovery) from error

        try:
            return tenacity.Retrying(**recovery.tenacity_options())(once)
        except SpecdecError as error:
            raise error.with_traceback(None) from None  # without the frames of the retries
