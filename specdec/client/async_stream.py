"""The asyncio client's stream of one output, which reconnects and resumes after an interruption.

`async_client` opens it; `transcript` reads the answers and `recovery` decides on retries.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc
import tenacity

from specdec.client.async_coordinators import AsyncAttempts
from specdec.client.recovery import Recovery, ended_early
from specdec.client.results import Chunk, Completion
from specdec.client.transcript import Transcript
from specdec.contract.errors import SpecdecError
from specdec.v1 import coordinator_pb2 as pb


class AsyncStream(AsyncIterator[Chunk]):
    """One output, streamed. Iterate it or await `result()`, and end it by `async with`, `aclose()` or its last chunk.

    After a lost connection, coordinator or lease the stream reconnects and resumes after the last token it returned, so
    that no token is lost or repeated. A failure ends it: the error has the output so far in `error.partial`.
    Cancelling the task that iterates cancels the call.
    """

    def __init__(self, attempts: AsyncAttempts, transcript: Transcript, recovery: Recovery) -> None:
        self._attempts = attempts
        self._transcript = transcript
        self._recovery = recovery
        self._retrying = tenacity.AsyncRetrying(**self._recovery.tenacity_options())
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
    def num_prompt_tokens(self) -> int:
        """Number of tokens in the session before the output; 0 before the first chunk."""
        return self._transcript.num_prompt_tokens

    @property
    def target_fingerprint(self) -> str:
        """Fingerprint of the model that decides every token; "" before the first chunk."""
        return self._transcript.target_fingerprint

    @property
    def target_changed(self) -> bool:
        """True if another target model decided the session's previous turn; False before the first chunk."""
        return self._transcript.target_changed

    @property
    def adapter(self) -> str:
        """Name of the target model's adapter; "" for none, and before the first chunk."""
        return self._transcript.adapter

    @property
    def constraint_warnings(self) -> tuple[str, ...]:
        """Demands of a lenient constraint that the output may not follow; empty before the first chunk."""
        return self._transcript.constraint_warnings

    async def __anext__(self) -> Chunk:
        """Return the next chunk.

        Raises:
            SpecdecError: the server refused, or the interruption outlasted its budget. The stream is over then.
        """
        try:
            chunk = await self._next_chunk()
        except SpecdecError as error:
            self._end()
            error.partial = self._transcript.partial()
            self._failure = error
            raise error.with_traceback(None) from None  # without the frames of the retries
        if chunk is None:
            self._end()
            raise StopAsyncIteration
        return chunk

    async def result(self) -> Completion:
        """Read to the end and return the whole output; after `aclose()`, the part received ("cancelled").

        Raises:
            SpecdecError: the stream failed. The same error is raised once, also if iteration has raised it before; a
                further call returns the part received.
        """
        with contextlib.suppress(SpecdecError):  # kept in _failure
            async for _ in self:
                pass
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure.with_traceback(None) from None
        return self._transcript.completion()

    async def aclose(self) -> None:
        """Cancel the call unless it has ended. A task that iterates sees the end of the stream. Idempotent."""
        self._failure = None
        self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _next_chunk(self) -> Chunk | None:
        """Return the next chunk; None at the end. Raises SpecdecError."""
        while not (self._transcript.finished or self._closed):
            response = await self._read_or_retry()
            if response is None:
                break
            chunk = self._transcript.accept(response)
            self._recovery.answered(with_new_tokens=chunk is not None)
            if chunk is not None:
                return chunk
        return None

    async def _read_or_retry(self) -> pb.GenerateResponse | None:
        """Return the next message; None once the stream is closed. Raises SpecdecError.

        The retries of tenacity take longer than everything else in this client does for a message, so they begin after
        a failure, which counts as their first attempt.
        """
        try:
            return await self._read()
        except Exception as error:
            failures = [error]

        async def attempt() -> pb.GenerateResponse | None:
            if failures:
                raise failures.pop()
            return await self._read()

        response: pb.GenerateResponse | None = await self._retrying(attempt)
        return response

    def _end(self) -> None:
        self._closed = True
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def _read(self) -> pb.GenerateResponse | None:
        """Return the next message; None once the stream is closed."""
        if self._closed:
            return None  # closed during the wait for a retry
        call = self._call
        if call is None:
            call = await self._attempts.begin("Generate", self._transcript.next_request(), self._recovery)
            if self._closed:  # closed while a coordinator was chosen
                call.cancel()
                return None
            self._call = call
        try:
            message: pb.GenerateResponse | None = await self._attempts.read(call)
        except grpc.RpcError as error:
            self._call = None
            if self._closed:
                return None
            raise self._attempts.failed(error, self._recovery) from error
        except BaseException:
            self._end()
            raise
        if message is None:
            self._call = None
            if self._closed:
                return None
            raise ended_early()
        return message
