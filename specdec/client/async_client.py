"""The asyncio client: one channel, any number of calls at once.

Not here: what a message means (`transcript`, `results`, `request`) and when to retry (`recovery`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import tenacity

from specdec.client.recovery import CHANNEL_OPTIONS, Budgets, Recovery, ended_early
from specdec.client.request import ChatMessage, GenerateOptions, build_request, build_tokenize_request
from specdec.client.results import Chunk, Completion, ServerInfo, Session, read_server_info, read_session
from specdec.client.sessions import SessionSizes
from specdec.client.transcript import Transcript
from specdec.rpc.status import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub


class AsyncStream(AsyncIterator[Chunk]):
    """One output as it is made. Iterate it, or await `result()`; leave it by `async with`, `aclose()` or the end.

    On a lost connection, coordinator or lease it reconnects and resumes after the last token it handed over, so that
    no token is lost or doubled. Cancelling the task that iterates cancels the call.
    """

    def __init__(
        self, open_call: Callable[[pb.GenerateRequest], Any], transcript: Transcript, endpoint: str, budgets: Budgets
    ) -> None:
        self._open_call = open_call
        self._endpoint = endpoint
        self._transcript = transcript
        self._recovery = Recovery(budgets)
        self._retrying = tenacity.AsyncRetrying(**self._recovery.tenacity_options())
        self._call: Any = None

    @property
    def session_id(self) -> str:
        return self._transcript.request.session_id

    @property
    def request_id(self) -> str:
        return self._transcript.request_id

    @property
    def target_fingerprint(self) -> str:
        """Of the model that decides every token; "" before the first chunk."""
        return self._transcript.target_fingerprint

    @property
    def target_changed(self) -> bool:
        """Whether the session's turn before was another target model's; False before the first chunk."""
        return self._transcript.target_changed

    async def __anext__(self) -> Chunk:
        """The next chunk.

        Raises:
            SpecdecError: the server refused, or the interruption outlasted its budget.
        """
        while not self._transcript.finished:
            response: pb.GenerateResponse = await self._retrying(self._read)
            chunk = self._transcript.accept(response)
            self._recovery.answered(with_news=chunk is not None)
            if chunk is not None:
                return chunk
        await self.aclose()
        raise StopAsyncIteration

    async def result(self) -> Completion:
        """Reads what is left and returns the whole output. Raises as iteration does."""
        async for _ in self:
            pass
        return self._transcript.completion()

    async def aclose(self) -> None:
        """Cancels the call where it has not ended. Idempotent."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _read(self) -> pb.GenerateResponse:
        if self._call is None:
            self._call = self._open_call(self._transcript.next_request())
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            self._call = None
            raise from_rpc_error(error, peer=self._endpoint) from error
        except BaseException:
            await self.aclose()
            raise
        if response is grpc.aio.EOF:
            self._call = None
            raise ended_early()
        message: pb.GenerateResponse = response
        return message


class AsyncClient:
    """Speaks to a coordinator. Make and use it within one event loop; close it, or use it by `async with`."""

    def __init__(self, endpoint: str, *, budgets: Budgets | None = None) -> None:
        """Connects on the first call.

        Args:
            endpoint: HOST:PORT, or any gRPC target; `ipv4:A:1,B:2` names several coordinators.
            budgets: how long to keep trying; the defaults of `Budgets` otherwise.
        """
        self._endpoint = endpoint
        self._budgets = budgets or Budgets()
        self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._stub = CoordinatorServiceStub(self._channel)
        self._sizes = SessionSizes()

    @overload
    def generate(
        self, prompt: str | None = None, *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> AsyncStream: ...

    @overload
    def generate(
        self, prompt: str | None = None, *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> Coroutine[Any, Any, Completion]: ...

    def generate(
        self, prompt: str | None = None, *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> AsyncStream | Coroutine[Any, Any, Completion]:
        """Generates from a prompt, token ids or messages (exactly one), in a new session or the next turn of one.

        Idempotent: the client sends session and request ids of its own, so retries join what they began. The next turn
        of a session says how many tokens the last answer left in it, so that a session that was lost meanwhile is
        SessionLost; `delete_session`, or `expected_session_tokens=0`, begins it anew.

        Args:
            prompt: text, appended to what the session holds.
            stream: True returns an `AsyncStream` to iterate; False something to await for the `Completion`.
            options: see `GenerateOptions`.

        Raises:
            SpecdecError: InvalidRequest here and now for what does not fit a message, else once awaited or iterated.
        """
        made = AsyncStream(
            self._stub.Generate,
            Transcript(self._sizes.state(build_request(prompt, options)), self._sizes),
            self._endpoint,
            self._budgets,
        )
        return made if stream else _completed(made)

    def resume(self, session_id: str, resume_from: int, *, provenance: bool = False) -> AsyncStream:
        """Streams the session's last request from output token `resume_from` on."""
        request = pb.GenerateRequest(session_id=session_id, resume_from=resume_from, return_provenance=provenance)
        return AsyncStream(self._stub.Generate, Transcript(request, self._sizes), self._endpoint, self._budgets)

    async def get_session(self, session_id: str, *, include_token_ids: bool = False) -> Session:
        """Reads a session's record. Raises NotFound for an unknown one."""
        request = pb.GetSessionRequest(session_id=session_id, include_token_ids=include_token_ids)
        return read_session(await self._ask(self._stub.GetSession, request))

    async def delete_session(self, session_id: str) -> None:
        """Frees the session everywhere. Idempotent; an unknown id is fine."""
        self._sizes.forget(session_id)
        await self._ask(self._stub.DeleteSession, pb.DeleteSessionRequest(session_id=session_id))

    async def tokenize(
        self, text: str | None = None, *, messages: Sequence[ChatMessage] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text or a conversation, as `generate` would see them in a new session."""
        return tuple((await self._ask(self._stub.Tokenize, build_tokenize_request(text, messages))).token_ids)

    async def info(self) -> ServerInfo:
        """What is being served, and by which replicas."""
        return read_server_info(await self._ask(self._stub.GetInfo, pb.GetInfoRequest()))

    async def close(self) -> None:
        """Ends every call and the connection. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, method: Callable[..., Any], request: Any) -> Any:
        async def once() -> Any:
            try:
                return await method(request)
            except grpc.RpcError as error:
                raise from_rpc_error(error, peer=self._endpoint) from error

        return await tenacity.AsyncRetrying(**Recovery(self._budgets).tenacity_options())(once)


async def _completed(stream: AsyncStream) -> Completion:
    async with stream:
        return await stream.result()
