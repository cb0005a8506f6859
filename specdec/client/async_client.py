"""The asyncio client: one channel, any number of calls at once.

Not here: what a message means (`transcript`, `results`, `request`) and when to retry (`recovery`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import tenacity

from specdec.client.coordinators import AsyncAttempts, AsyncCoordinators
from specdec.client.failures import closed
from specdec.client.recovery import Budgets, Recovery, ended_early
from specdec.client.request import (
    ChatMessage,
    GenerateOptions,
    Input,
    build_message,
    build_request,
    build_tokenize_request,
)
from specdec.client.results import (
    Chunk,
    Completion,
    Promotion,
    ServerInfo,
    Session,
    read_promotion,
    read_server_info,
    read_session,
)
from specdec.client.sessions import SessionSizes
from specdec.client.transcript import Transcript
from specdec.v1 import coordinator_pb2 as pb


class AsyncStream(AsyncIterator[Chunk]):
    """One output as it is made. Iterate it, or await `result()`; leave it by `async with`, `aclose()` or the end.

    On a lost connection, coordinator or lease it reconnects and resumes after the last token it handed over, so that
    no token is lost or doubled. Cancelling the task that iterates cancels the call.
    """

    def __init__(self, attempts: AsyncAttempts, transcript: Transcript, recovery: Recovery) -> None:
        self._attempts = attempts
        self._transcript = transcript
        self._recovery = recovery
        self._retrying = tenacity.AsyncRetrying(**self._recovery.tenacity_options())
        self._call: Any = None
        self._closed = False

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
        while not (self._transcript.finished or self._closed):
            response: pb.GenerateResponse | None = await self._retrying(self._read)
            if response is None:
                break
            chunk = self._transcript.accept(response)
            self._recovery.answered(with_news=chunk is not None)
            if chunk is not None:
                return chunk
        await self.aclose()
        raise StopAsyncIteration

    async def result(self) -> Completion:
        """Reads what is left and returns the whole output; once closed, what came until then ("cancelled").

        Raises as iteration does.
        """
        async for _ in self:
            pass
        return self._transcript.completion()

    async def aclose(self) -> None:
        """Cancels the call where it has not ended; a task that iterates sees the end. Idempotent."""
        self._closed = True
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _read(self) -> pb.GenerateResponse | None:
        """The next message; None once closed."""
        if self._closed:
            return None  # while it waited to try again
        call = self._call
        if call is None:
            call = await self._attempts.begin("Generate", self._transcript.next_request(), self._recovery)
            if self._closed:  # while it looked for a coordinator
                call.cancel()
                return None
            self._call = call
        try:
            response = await call.read()
        except grpc.RpcError as error:
            self._call = None
            raise self._attempts.failed(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                await self.aclose()
                raise
            # gRPC's word for a call that another task has ended: by `aclose`, or with its whole client.
            self._call = None
            if self._closed:
                return None
            raise ended_early() from None
        except BaseException:
            await self.aclose()
            raise
        if response is grpc.aio.EOF:
            self._call = None
            raise ended_early()
        message: pb.GenerateResponse = response
        return message


class AsyncClient:
    """Speaks to a coordinator. Make and use it within one event loop; close it, or use it by `async with`.

    Afterwards every call raises ClientClosed.
    """

    def __init__(self, endpoint: str, *, budgets: Budgets | None = None, timeout: float | None = None) -> None:
        """Connects on the first call.

        Args:
            endpoint: HOST:PORT, or any gRPC target; `ipv4:A:1,B:2` names several coordinators.
            budgets: how long to keep trying; the defaults of `Budgets` otherwise.
            timeout: seconds that each call may take as a whole, unless it has a timeout of its own; None: no limit.

        Raises:
            InvalidRequest: an endpoint that cannot be one.
        """
        self._timeout = timeout
        self._closed = False
        self._budgets = budgets or Budgets()
        self._coordinators = AsyncCoordinators(endpoint)
        self._sizes = SessionSizes()

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
        """Generates from a prompt, token ids or messages (exactly one), in a new session or the next turn of one.

        Idempotent: the client sends session and request ids of its own, so retries join what they began. The next turn
        of a session says how many tokens the last answer left in it, so that a session that was lost meanwhile is
        SessionLost; `delete_session`, or `expected_session_tokens=0`, begins it anew.

        Args:
            prompt: text, appended to what the session holds; or messages, as the option of that name.
            stream: True returns an `AsyncStream` to iterate; False something to await for the `Completion`.
            options: see `GenerateOptions`.

        Raises:
            SpecdecError: InvalidRequest here and now for what does not fit a message, else once awaited or iterated:
                DeadlineExceeded where it takes longer than its timeout.
        """
        made = self._stream(self._sizes.state(build_request(prompt, options)), options.get("timeout"))
        if not stream:
            return _completed(made)
        if self._closed:  # who awaits an output is told then
            raise closed()
        return made

    def resume(
        self, session_id: str, resume_from: int, *, provenance: bool = False, timeout: float | None = None
    ) -> AsyncStream:
        """Streams the session's last request from output token `resume_from` on.

        The stream raises InvalidRequest where the request has ended with fewer tokens, SessionLost where the server
        has fewer of one that has not. Raises InvalidRequest here and now for what does not fit a message.
        """
        request = build_message(
            pb.GenerateRequest, session_id=session_id, resume_from=resume_from, return_provenance=provenance
        )
        if self._closed:
            raise closed()
        return self._stream(request, timeout)

    async def get_session(self, session_id: str, *, include_token_ids: bool = False) -> Session:
        """Reads a session's record. Raises NotFound for an unknown one."""
        request = build_message(pb.GetSessionRequest, session_id=session_id, include_token_ids=include_token_ids)
        return read_session(await self._ask("GetSession", request))

    async def delete_session(self, session_id: str) -> None:
        """Frees the session everywhere. Idempotent; an unknown id is fine.

        A request that runs on it ends with `NotFound`: at this coordinator at once, at another one when its next round
        is done.
        """
        request = build_message(pb.DeleteSessionRequest, session_id=session_id)
        self._sizes.forget(session_id)
        await self._ask("DeleteSession", request)
        self._sizes.forget(session_id)  # once more: an answer may have begun before the deletion

    async def tokenize(
        self, text: str | None = None, *, messages: Sequence[ChatMessage] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text or a conversation, as `generate` would see them in a new session."""
        return tuple((await self._ask("Tokenize", build_tokenize_request(text, messages))).token_ids)

    async def promote(self, draft_pool: str, share: float = 1.0) -> Promotion | None:
        """Gives sessions a draft pool, share by share up to `share` of them; 0 ends what is being promoted.

        It goes back by itself where it makes fewer tokens a second. Raises NotFound where there is no such pool,
        Unsupported where requests are not routed.
        """
        answer = await self._ask("Promote", build_message(pb.PromoteRequest, draft_pool=draft_pool, share=share))
        return read_promotion(answer.promotion) if answer.HasField("promotion") else None

    async def info(self) -> ServerInfo:
        """What is being served, and by which replicas."""
        return read_server_info(await self._ask("GetInfo", pb.GetInfoRequest()))

    async def close(self) -> None:
        """Ends every call and the connection. Idempotent."""
        self._closed = True
        await self._coordinators.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _stream(self, request: pb.GenerateRequest, timeout: float | None) -> AsyncStream:
        recovery = Recovery(self._budgets, self._timeout if timeout is None else timeout, needs_target=True)
        return AsyncStream(AsyncAttempts(self._coordinators), Transcript(request, self._sizes), recovery)

    async def _ask(self, method: str, request: Any) -> Any:
        recovery = Recovery(self._budgets, self._timeout)
        attempts = AsyncAttempts(self._coordinators)

        async def once() -> Any:
            try:
                return await (await attempts.begin(method, request, recovery))
            except grpc.RpcError as error:
                raise attempts.failed(error) from error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._closed and task is not None and not task.cancelling():
                    raise closed() from None  # gRPC's word for it
                raise

        return await tenacity.AsyncRetrying(**recovery.tenacity_options())(once)


async def _completed(stream: AsyncStream) -> Completion:
    async with stream:
        return await stream.result()
