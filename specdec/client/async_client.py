"""The asyncio client: one connection, any number of concurrent calls. `sync_client` is generated from it.

`request` builds its messages, `results` and `transcript` read the answers, `recovery` decides on retries.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import tenacity

from specdec.access.tls import Tls
from specdec.client.async_coordinators import AsyncAttempts, AsyncCoordinators
from specdec.client.async_stream import AsyncStream
from specdec.client.endpoints import resolve_endpoint
from specdec.client.failures import closed
from specdec.client.identity import Identity, trace_metadata
from specdec.client.messages import ChatMessage
from specdec.client.recovery import Budgets, Recovery
from specdec.client.request import (
    GenerateOptions,
    Input,
    build_detokenize_request,
    build_message,
    build_request,
    build_tokenize_request,
)
from specdec.client.results import Completion, Session, read_session
from specdec.client.server_info import (
    Drained,
    Promotion,
    ServerInfo,
    TargetModel,
    read_drained,
    read_promotion,
    read_server_info,
    read_target_models,
)
from specdec.client.transcript import Transcript
from specdec.client.transport import require_private_key, resolve_tls
from specdec.contract.errors import SpecdecError
from specdec.v1 import coordinator_pb2 as pb


class AsyncClient(Identity):
    """Client of a coordinator, for the event loop of its first call. Close it, or use `async with`.

    Once it is closed, every call raises ClientClosed.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        budgets: Budgets | None = None,
        timeout: float | None = None,
        api_key: str | None = None,
        tls: Tls | bool | None = None,
        insecure: bool = False,
        remembers_sessions: bool = True,
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
            remembers_sessions: whether the next turn of a session states how many tokens it should hold. False for a
                client whose sessions other clients continue, too.

        Raises:
            InvalidRequest: the endpoint is neither HOST:PORT nor a gRPC target, or the key has other characters than
                printable ASCII or would be sent in plaintext beyond this machine, or a certificate file cannot be used.
        """
        self._timeout = timeout
        self._budgets = budgets or Budgets()
        address, credentials = resolve_endpoint(endpoint), resolve_tls(tls)
        require_private_key(address, credentials, api_key, insecure=insecure)
        self._coordinators = AsyncCoordinators(address, credentials)
        self._identify(api_key, remembers_sessions=remembers_sessions)

    @overload
    def generate(
        self, prompt: Input = None, *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> AsyncStream: ...

    @overload
    def generate(
        self, prompt: Input = None, *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> Coroutine[Any, Any, Completion]: ...

    def generate(
        self, prompt: Input = None, *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> AsyncStream | Coroutine[Any, Any, Completion]:
        """Generate from a prompt, token ids or messages (exactly one), in a new session or the next turn of one.

        The call is idempotent: the client makes the session and request ids, so a retry joins what it began. The next
        turn of a session states how many tokens the session should hold, so that a session lost meanwhile raises
        SessionLost; `delete_session`, or `expected_session_tokens=0`, starts it anew.

        Args:
            prompt: text to append to the session, or messages, as in the option of that name.
            stream: True returns an `AsyncStream` to iterate, False an awaitable `Completion`.
            options: see `GenerateOptions`.

        Raises:
            InvalidRequest: an option does not fit the request message. The call itself raises this one.
            SpecdecError: awaiting or iterating raises the other errors, such as DeadlineExceeded.
        """
        request = self._sizes.add_expected_tokens(build_request(prompt, options))
        output = self._stream(request, options.get("timeout"), options.get("traceparent"))
        if not stream:
            return _completed(output)
        if self._coordinators.is_closed:  # awaiting a completion raises it by itself
            raise closed()
        return output

    def resume(
        self,
        session_id: str,
        resume_from: int,
        *,
        provenance: bool = False,
        timeout: float | None = None,
        traceparent: str | None = None,
    ) -> AsyncStream:
        """Stream the session's last request from output token `resume_from` on.

        The stream raises InvalidRequest if the request has ended with fewer tokens, and SessionLost if the server holds
        fewer tokens of a request that has not ended. The call itself raises InvalidRequest for an argument that does
        not fit the request message.
        """
        request = build_message(
            pb.GenerateRequest, session_id=session_id, resume_from=resume_from, return_provenance=provenance
        )
        if self._coordinators.is_closed:
            raise closed()
        return self._stream(request, timeout, traceparent)

    async def get_session(self, session_id: str, *, include_token_ids: bool = False) -> Session:
        """Return a session's record. Raises NotFound for an unknown session."""
        request = build_message(pb.GetSessionRequest, session_id=session_id, include_token_ids=include_token_ids)
        return read_session(await self._call("GetSession", request))

    async def delete_session(self, session_id: str) -> None:
        """Free the session everywhere. Idempotent; an unknown id is accepted.

        A request that runs in the session ends with `NotFound`: at once in this coordinator, after its next round in
        another one.
        """
        request = build_message(pb.DeleteSessionRequest, session_id=session_id)
        self._sizes.forget(session_id)
        await self._call("DeleteSession", request)
        self._sizes.forget(session_id)  # again: a turn may have begun before the deletion

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a text or conversation as a new session would hold them."""
        request = build_tokenize_request(text, messages, chat_template_kwargs, tools)
        answer = await self._call("Tokenize", request)
        return tuple(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, as `generate` would make it from them.

        Special tokens add no text, or their names if `skip_special_tokens` is False. Raises InvalidRequest for more
        ids than the context holds, or an id outside the vocabulary.
        """
        request = build_detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        answer = await self._call("Detokenize", request)
        return str(answer.text)

    async def promote(self, draft_pool: str, share: float = 1.0) -> Promotion | None:
        """Move sessions to a draft pool in steps, up to the share `share` of them; 0 ends the current promotion.

        The server rolls the promotion back if the pool gives fewer tokens per second. Raises NotFound for an unknown
        pool, Unsupported if the system does not route requests, and Forbidden if operator calls are answered at
        another address, `info().admin_address`, or the API key lacks the right.
        """
        answer = await self._call("Promote", build_message(pb.PromoteRequest, draft_pool=draft_pool, share=share))
        return read_promotion(answer.promotion) if answer.HasField("promotion") else None

    async def promote_target(self, fingerprint: str, share: float = 1.0) -> tuple[TargetModel, ...]:
        """Give a target model a share of the new sessions, 0 to 1, at once; return the models with their shares.

        The other models divide the rest by the number of their replicas. With fingerprint "" the share of every model
        is that of its replicas again. Sessions keep their model while it is served. Raises NotFound for an unknown
        fingerprint (see `info().target_models`), and Forbidden as `promote`.
        """
        request = build_message(pb.PromoteRequest, target_fingerprint=fingerprint, share=share)
        answer = await self._call("Promote", request)
        return read_target_models(answer.target_models)

    async def drain(self, replica_id: str, *, undo: bool = False) -> Drained:
        """Let a replica, or the coordinator itself, take no new sessions; return what is left there. Idempotent.

        Running turns end where they are. Call it again until `num_streams` is 0, then end the process. With `undo`, it
        takes new sessions again. Raises NotFound for an unknown id or address, and Forbidden as `promote`.
        """
        answer = await self._call("Drain", build_message(pb.DrainRequest, replica_id=replica_id, undo=undo))
        return read_drained(answer)

    async def info(self) -> ServerInfo:
        """Return the served model, the pools and their replicas."""
        return read_server_info(await self._call("GetInfo", pb.GetInfoRequest()))

    async def close(self) -> None:
        """End every call and close the connection; no effect on a client that `for_tenant` returned. Idempotent."""
        if not self._is_view:
            await self._coordinators.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _stream(self, request: pb.GenerateRequest, timeout: float | None, traceparent: str | None) -> AsyncStream:
        recovery = Recovery(self._budgets, self._timeout if timeout is None else timeout, needs_target=True)
        attempts = AsyncAttempts(self._coordinators, (*self._metadata, *trace_metadata(traceparent)))
        return AsyncStream(attempts, Transcript(request, self._sizes), recovery)

    async def _call(self, method: str, request: Any) -> Any:
        recovery = Recovery(self._budgets, self._timeout)
        attempts = AsyncAttempts(self._coordinators, self._metadata)

        async def once() -> Any:
            try:
                return await attempts.answer(method, request, recovery)
            except grpc.RpcError as error:
                raise attempts.failed(error, recovery) from error

        try:
            return await tenacity.AsyncRetrying(**recovery.tenacity_options())(once)
        except SpecdecError as error:
            raise error.with_traceback(None) from None  # without the frames of the retries


async def _completed(stream: AsyncStream) -> Completion:
    async with stream:
        return await stream.result()
