"""The published output of a request and its readers: a view of the end of the token log, bounded whoever reads or not.

Committed tokens come from `publisher` as chunks; each reader takes them as events, which `front/servicer` sends to its
client. A reader who falls too far behind is cut off and resumes from the log. Not here: what is published and when
(`generation`, `publisher`), reading the log (`request_log`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from coordinator.requests import Event, Finished, GenerationIdentity, OutputChunk, Provenance, Started
from coordinator.text.output import OutputStep
from specdec.errors import ResourceExhausted, SpecdecError
from specdec.types import FinishReason

#: Output tokens that are kept for readers who are slower than the generation; the session's log holds them all.
MAX_BUFFERED_TOKENS = 2048


class OutputStream:
    """The end of one request's published output. Readers come and go; none of them slows the others, and one that has
    fallen too far behind is cut off: what it lacks is in the log, from where it can be resumed.
    """

    def __init__(self, identity: GenerationIdentity) -> None:
        self.identity = identity
        self.num_tokens = 0
        self._chunks: deque[OutputChunk] = deque()
        self._num_dropped = 0
        """Chunks before those."""
        self._finished: Finished | None = None
        self._error: SpecdecError | None = None
        self._reading: set[Subscription] = set()
        self._readers: list[asyncio.Future[None]] = []
        """Those that have read everything."""

    @property
    def num_dropped_tokens(self) -> int:
        """Output tokens that only the log still has."""
        return self._chunks[0].start if self._chunks else 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until it ended well."""
        return None if self._finished is None else self._finished.reason

    @property
    def is_over(self) -> bool:
        return self._finished is not None or self._error is not None

    def publish(self, step: OutputStep, provenance: Provenance | None = None) -> None:
        """Adds one chunk; `provenance` is of tokens that do not come from the log."""
        if step.token_ids:
            chunk = OutputChunk(self.num_tokens, step.token_ids, step.texts, provenance)
            self._chunks.append(chunk)
            self.num_tokens = chunk.end
            if self.num_tokens - self._chunks[0].end > MAX_BUFFERED_TOKENS:
                self._drop_oldest()
        self._tell()

    def _drop_oldest(self) -> None:
        while self.num_tokens - self._chunks[0].end > MAX_BUFFERED_TOKENS:
            self._chunks.popleft()
            self._num_dropped += 1
        for reader in self._reading:
            if reader.chunk_index < self._num_dropped:
                reader.cut(_behind())

    def finish(self, finished: Finished) -> None:
        self._finished = finished
        self._tell()

    def fail(self, error: SpecdecError) -> None:
        """Ends the stream for every reader with an error. A stream that is over stays as it is."""
        if not self.is_over:
            self._error = error
            self._tell()

    async def read(self, reader: Subscription, position: int) -> AsyncGenerator[Event, None]:
        """Events from output token `position` on, up to the end.

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
        )
        if (replayed := reader.replayed) is not None and replayed.end > position:
            yield replayed.since(position)
            position = replayed.end
        while True:
            while reader.chunk_index < self._num_dropped + len(self._chunks):
                chunk = self._chunks[max(0, reader.chunk_index - self._num_dropped)]
                if chunk.start > position:
                    raise _behind()
                reader.chunk_index += 1
                if chunk.end > position:
                    yield chunk.since(position)
                    position = chunk.end
            if self._error is not None:
                raise self._error
            if self._finished is not None:
                yield self._finished
                return
            await self._next_news()

    def attach(self, reader: Subscription) -> None:
        """From here on it is cut off when what it reads next is dropped."""
        reader.chunk_index = self._num_dropped
        self._reading.add(reader)

    def detach(self, reader: Subscription) -> None:
        self._reading.discard(reader)

    def _next_news(self) -> asyncio.Future[None]:
        """Done at the next `_tell`."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._readers.append(news)
        return news

    def _tell(self) -> None:
        readers, self._readers = self._readers, []
        for news in readers:
            if not news.done():
                news.set_result(None)


def _behind() -> ResourceExhausted:
    return ResourceExhausted(
        f"the stream was not read while {MAX_BUFFERED_TOKENS} tokens were made; resume it after the last token read"
    )


class Subscription:
    """One reader of a generation. Close it: the last reader's going away cancels the generation."""

    def __init__(
        self, stream: OutputStream, start: int, on_close: Callable[[], None], replayed: OutputChunk | None = None
    ) -> None:
        """`replayed`: output from its first token on, read from the log for a reader who needs what is not kept."""
        self._stream = stream
        self._start = start
        self._on_close: Callable[[], None] | None = on_close
        self._task: asyncio.Task[Any] | None = None
        self.replayed = replayed
        self.chunk_index = 0
        """Of the chunk it takes next, dropped ones counted."""
        self.behind: SpecdecError | None = None
        """Why it was cut off, once it was."""
        stream.attach(self)

    @property
    def identity(self) -> GenerationIdentity:
        return self._stream.identity

    def events(self) -> AsyncGenerator[Event, None]:
        """Started, then chunks, then Finished. Raises as `OutputStream.read`.

        To be called by the task that hands the events on. That task may hang in handing one on, to a peer that does
        not read: when the reader is cut off, the task is cancelled, and `behind` says why.
        """
        self._task = asyncio.current_task()
        return self._stream.read(self, self._start)

    def cut(self, reason: SpecdecError) -> None:
        """Ends the reading. Idempotent."""
        if self.behind is None:
            self.behind = reason
            if self._task is not None:
                self._task.cancel()

    def close(self) -> None:
        """Idempotent."""
        self._stream.detach(self)
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
