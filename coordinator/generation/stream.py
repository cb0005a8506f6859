"""The published output of a request and its readers.

Committed tokens come from `publisher` as chunks. Each reader takes them as events, which `front/servicer` sends to its
client. The stream holds the last `MAX_BUFFERED_TOKENS` tokens, whether they are read or not: a reader that falls
further behind is cut off and resumes from the log. So is one that takes nothing for `MAX_SENDING_S`, also after the
output is complete, when nothing can fall behind any more.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from coordinator.requests import Event, Finished, GenerationIdentity, OutputChunk, Provenance, RequestStats, Started
from coordinator.text.output import OutputStep, OutputWriter
from specdec.contract.errors import ResourceExhausted, SpecdecError
from specdec.contract.types import FinishReason

#: Longest time that sending one event to a reader may take, before the reader is cut off.
MAX_SENDING_S = 60.0

#: Largest number of tokens of one event. gRPC keeps an event until its client reads, also after the reader was cut off.
MAX_PIECE_TOKENS = 128

#: Number of output tokens kept for readers that are slower than the generation. The session's log holds all of them.
MAX_BUFFERED_TOKENS = 2048


class OutputStream:
    """The last part of one request's published output. A slow reader does not delay the others."""

    def __init__(self, identity: GenerationIdentity) -> None:
        self.identity = identity
        self.num_tokens = 0
        self._chunks: deque[OutputChunk] = deque()
        self._num_dropped = 0
        """Number of chunks dropped before `_chunks`."""
        self._finished: Finished | None = None
        self._error: SpecdecError | None = None
        self._reading: set[Subscription] = set()
        self._waiting: list[asyncio.Future[None]] = []
        """Futures of readers that have read everything."""

    @property
    def num_dropped_tokens(self) -> int:
        """Number of leading output tokens that only the log still holds."""
        return self._chunks[0].start if self._chunks else 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason for which the output ended; None while it grows, and after an error."""
        return None if self._finished is None else self._finished.reason

    @property
    def is_over(self) -> bool:
        return self._finished is not None or self._error is not None

    def publish(self, step: OutputStep, provenance: Provenance | None = None) -> None:
        """Add one chunk; `provenance` is None for tokens that come from the log."""
        if step.token_ids:
            chunk = OutputChunk(self.num_tokens, step.token_ids, step.texts, provenance, step.parts)
            self._chunks.append(chunk)
            self.num_tokens = chunk.end
            if self.num_tokens - self._chunks[0].end > MAX_BUFFERED_TOKENS:
                self._drop_oldest()
        self._wake_readers()

    def _drop_oldest(self) -> None:
        while self.num_tokens - self._chunks[0].end > MAX_BUFFERED_TOKENS:
            self._chunks.popleft()
            self._num_dropped += 1
        for reader in self._reading:
            if reader.chunk_index < self._num_dropped:
                reader.cut(_behind())

    def finish(self, finished: Finished) -> None:
        self._finished = finished
        self._wake_readers()

    def fail(self, error: SpecdecError) -> None:
        """End the stream for every reader with an error. A stream that is over is not changed."""
        if not self.is_over:
            self._error = error
            self._wake_readers()

    async def read(self, reader: Subscription, position: int) -> AsyncGenerator[Event, None]:
        """Yield the events from output token `position` on, up to the end.

        Raises:
            SpecdecError: what ended the generation early, after everything that was published before.
            ResourceExhausted: the token at `position` is no longer kept; the stream can be resumed from the log.
        """
        identity, parameters = self.identity, self.identity.parameters
        yield Started(
            identity.session_id,
            identity.request_id,
            identity.output_start,
            parameters.sampling.seed,
            parameters.target_fingerprint,
            parameters.target_changed,
            parameters.constraint_warnings,
            parameters.adapter,
        )
        if (replayed := reader.replayed) is not None and replayed.end > position:
            for piece in replayed.since(position).pieces(MAX_PIECE_TOKENS):
                yield piece
            position = replayed.end
        while True:
            while reader.chunk_index < self._num_dropped + len(self._chunks):
                chunk = self._next_chunk(reader)
                if chunk.start > position:
                    raise _behind()
                if chunk.end > position:
                    for piece in chunk.since(position).pieces(MAX_PIECE_TOKENS):
                        yield piece
                    position = chunk.end
            if self._error is not None:
                raise self._error
            if self._finished is not None:
                yield self._finished
                return
            await self._next_change()

    def _next_chunk(self, reader: Subscription) -> OutputChunk:
        """Take what a reader has not read: one chunk, or all as one if the reader joins them."""
        first = max(0, reader.chunk_index - self._num_dropped)
        end = len(self._chunks) if reader.joins_chunks else first + 1
        reader.chunk_index = self._num_dropped + end
        if end == first + 1:
            return self._chunks[first]
        return OutputChunk.joined([self._chunks[index] for index in range(first, end)])

    def attach(self, reader: Subscription) -> None:
        """Cut the reader off, from now on, when a chunk that it has not read is dropped."""
        reader.chunk_index = self._num_dropped
        self._reading.add(reader)

    def detach(self, reader: Subscription) -> None:
        self._reading.discard(reader)

    def _next_change(self) -> asyncio.Future[None]:
        """Return a future that is done at the next `_wake_readers`."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(change)
        return change

    def _wake_readers(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)


def end_of(stream: OutputStream, reason: FinishReason, writer: OutputWriter, stats: RequestStats) -> Finished:
    """Return the end of an output that `writer` has written and `stream` has published."""
    form = stream.identity.parameters.output_form
    return Finished(
        reason,
        stream.identity.output_start,
        stream.num_tokens,
        stats,
        writer.num_reasoning_tokens,
        is_named_call=reason is FinishReason.TOOL_CALLS and form is not None and form.names_tool,
    )


def _stuck() -> ResourceExhausted:
    return ResourceExhausted(f"the stream was not read for {MAX_SENDING_S:g} s; resume it after the last token read")


def _behind() -> ResourceExhausted:
    return ResourceExhausted(
        f"the stream was not read while {MAX_BUFFERED_TOKENS} tokens were made; resume it after the last token read"
    )


class Subscription:
    """One reader of a generation. It must be closed: when the last reader closes, the generation is cancelled."""

    def __init__(
        self,
        stream: OutputStream,
        start: int,
        on_close: Callable[[SpecdecError | None], None],
        replayed: OutputChunk | None = None,
    ) -> None:
        """
        Args:
            stream: the stream to read.
            start: index of the first output token to read.
            on_close: called once, with `behind`.
            replayed: output from its first token on, read from the log because the stream no longer holds it.
        """
        self._stream = stream
        self._start = start
        self._on_close: Callable[[SpecdecError | None], None] | None = on_close
        self._task: asyncio.Task[Any] | None = None
        self.replayed = replayed
        self.chunk_index = 0
        """Index of the next chunk to read, counted with the dropped ones."""
        self.joins_chunks = False
        """True for a reader to which the origin of the tokens means nothing: chunks that are ready come as one."""
        self.behind: SpecdecError | None = None
        """Error for a reader that was cut off; None for any other."""
        self.sending_since_s: float | None = None
        """Time at which the sending of an event began, by `time.monotonic`; None while none is sent."""
        self._watch: asyncio.TimerHandle | None = None
        self.when_closed: Callable[[], None] = lambda: None
        """Called after `on_close`."""
        self.when_gone: Callable[[], None] = lambda: None
        """Called once, when the reader is closed and the calls of `hold` have ended."""
        self._num_holds = 1
        stream.attach(self)

    @property
    def identity(self) -> GenerationIdentity:
        return self._stream.identity

    def events(self, *, joins_chunks: bool = False) -> AsyncGenerator[Event, None]:
        """Yield Started, then chunks, then Finished. Raises as `OutputStream.read`.

        With `joins_chunks`, chunks that are ready at the same time come as one, without provenance.

        Call it in the task that sends the events on. That task may block in sending to a peer that does not read: when
        the reader is cut off, the task is cancelled, and `behind` holds the cause.
        """
        self._task, self.joins_chunks = asyncio.current_task(), joins_chunks
        self._watch = asyncio.get_running_loop().call_later(MAX_SENDING_S, self._cut_if_stuck)
        return self._stream.read(self, self._start)

    def _cut_if_stuck(self) -> None:
        # One timer for the whole stream, because a timer for each event would cost time on every round.
        loop = asyncio.get_running_loop()
        now_s = time.monotonic()
        left_s = MAX_SENDING_S - (0.0 if self.sending_since_s is None else now_s - self.sending_since_s)
        if left_s <= 0.0:
            self.cut(_stuck())
        else:
            self._watch = loop.call_later(left_s, self._cut_if_stuck)

    def cut(self, reason: SpecdecError) -> None:
        """End the reading. Idempotent."""
        if self.behind is None:
            self.behind = reason
            if self._task is not None:
                self._task.cancel()

    @property
    def is_closed(self) -> bool:
        return self._on_close is None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Close the subscription at the end. A task that `cut` cancelled inside raises `behind` instead."""
        try:
            yield
        except asyncio.CancelledError:
            if self.behind is None or (task := asyncio.current_task()) is None:
                raise
            task.uncancel()
            raise self.behind from None
        finally:
            self.close()

    def close(self) -> None:
        """Stop reading. Idempotent."""
        self._stream.detach(self)
        if self._watch is not None:
            self._watch.cancel()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self.behind)
            self.when_closed()
            self.let_go()

    def hold(self) -> None:
        """Note a call that keeps events of this reader until its client takes them. It calls `let_go` at its end."""
        self._num_holds += 1

    def let_go(self) -> None:
        """Note that the reader is closed, or that its call has ended."""
        self._num_holds -= 1
        if not self._num_holds:
            self.when_gone()
