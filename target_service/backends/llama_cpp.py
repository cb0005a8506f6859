"""The backend `llama-cpp`: llama.cpp in this process, with the logits of every position.

A thread owns the context. Questions that wait when a call of llama.cpp ends run together in the next one, so that
several sessions share the reading of the weights. Each session keeps its tokens in a sequence of the context; a new
session begins with a copy of the longest common prefix of another one of its tenant. The least recently used sequences
are dropped when room is needed.

Every sampler and every constraint is served exactly, since all logits are known. The package llama-cpp-python is the
extra `llama-cpp`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import Internal, InvalidSetting, ResourceExhausted, SpecdecError, Unsupported
from specdec.contract.types import TokenIds
from specdec.engine.remote.remote_model import ModelFiles, read_model_files
from specdec.settings.processors import num_processors
from target_service.backends.contract import Answer, BackendShape, RowsRequest
from target_service.backends.filtered_distributions import distributions_of
from target_service.backends.llama_context import BatchPart, LlamaContext, LlamaOptions

_NUM_SEQUENCES = 64
_BATCH_TOKENS = 512
_DEFAULT_CONTEXT_TOKENS = 8192

#: Time for which the thread waits for the masks of a question that has run. Later ones are applied outside the thread.
_MASK_PATIENCE_S = 0.0005

#: Tokens that must be common for a new session to begin with a copy of another one's.
_MIN_COMMON_TOKENS = 16

_log = logging.getLogger(__name__)

#: Size and number of the samples that a file's fingerprint is made of.
_SAMPLE_BYTES, _NUM_SAMPLES = 1 << 16, 64


@dataclass(slots=True)
class _Held:
    """Tokens that a sequence of the context holds."""

    session_id: str = ""
    tenant: str = ""
    token_ids: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    used: int = 0
    """Number of the newest batch that ran tokens of the sequence."""


@dataclass(frozen=True, slots=True)
class _Logits:
    """The logits of a question whose masks are late."""

    logits: NDArray[np.float32]
    """float32 [num_rows, V]."""
    num_cached_tokens: int


@dataclass(slots=True)
class _Waiting:
    rows_request: RowsRequest
    answered: asyncio.Future[Answer | _Logits]


@dataclass(slots=True)
class _Run:
    """A question that is run in the thread."""

    waiting: _Waiting
    sequence: int
    start: int
    """Number of tokens that the sequence holds already."""
    logits: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def rows_request(self) -> RowsRequest:
        return self.waiting.rows_request


_Outcome = Answer | _Logits | SpecdecError


class LlamaBackend:
    """Implements `contract.Backend`. Make one with `open_llama`."""

    def __init__(self, context: LlamaContext, shape: BackendShape) -> None:
        self.shape = shape
        self._context = context
        self._held = [_Held() for _ in range(context.options.num_sequences)]
        self._waiting: list[_Waiting] = []
        self._num_batches = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llama.cpp")
        self._running: asyncio.Task[None] | None = None
        self._forgotten: list[str] = []
        self._is_closed = False

    async def ask(self, rows_request: RowsRequest) -> Answer:
        """Return the distributions of a question; see `Backend.ask`.

        Raises:
            ResourceExhausted: the session is longer than the context's memory.
            InvalidRequest: the constraint allows no possible token, or its masks take too long.
        """
        waiting = _Waiting(rows_request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run_all())
        outcome = await waiting.answered
        if isinstance(outcome, Answer):
            return outcome
        assert rows_request.masks is not None  # only late masks leave logits without an answer
        masks = await rows_request.masks.result()
        distributions = await asyncio.to_thread(distributions_of, outcome.logits, rows_request, masks)
        return Answer(distributions, outcome.num_cached_tokens)

    def forget(self, session_ids: Sequence[str]) -> None:
        """Let the sequences of sessions be taken first, from the next batch on."""
        self._forgotten += session_ids

    @property
    def adapters(self) -> dict[str, str]:
        """Return none: settings with an adapter are refused."""
        return {}

    async def wait_changed(self) -> None:
        """Return never: the model is in this process."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Free the model. Idempotent."""
        if self._running is not None:
            await self._running
        self._thread.shutdown()
        if not self._is_closed:
            self._is_closed = True
            self._context.close()

    async def _run_all(self) -> None:
        """Run the questions that wait, a batch of them at a time, until none is left."""
        loop = asyncio.get_running_loop()
        while batch := [waiting for waiting in self._waiting if not waiting.answered.done()]:
            self._waiting.clear()
            forgotten, self._forgotten = self._forgotten, []
            outcomes = await loop.run_in_executor(self._thread, self._answer_all, batch, forgotten)
            for waiting, outcome in zip(batch, outcomes, strict=True):
                if waiting.answered.done():  # its caller has gone
                    continue
                if isinstance(outcome, SpecdecError):
                    waiting.answered.set_exception(outcome)
                else:
                    waiting.answered.set_result(outcome)
        self._waiting.clear()
        self._running = None

    # Everything below runs on the thread.

    def _answer_all(self, batch: Sequence[_Waiting], forgotten: Sequence[str]) -> list[_Outcome]:
        for held in self._held:
            if held.session_id in forgotten:
                held.used = 0
        outcomes: dict[int, _Outcome] = {}
        left = list(batch)
        while left:
            self._num_batches += 1
            together, left = left[: len(self._held)], left[len(self._held) :]
            outcomes |= self._answer_together(together)
        return [outcomes[id(waiting)] for waiting in batch]

    def _answer_together(self, batch: Sequence[_Waiting]) -> dict[int, _Outcome]:
        """Answer questions in common batches; if these fail, in halves, down to single questions."""
        try:
            runs: list[_Run] = []
            for waiting in batch:
                runs.append(self._begin(waiting, {run.sequence for run in runs}))
            for parts in _batches([self._part(run) for run in runs], self._context.options.batch_tokens):
                self._decode(runs, parts)
            return {id(run.waiting): self._answer(run) for run in runs}
        except Exception as error:
            if not isinstance(error, ResourceExhausted):  # the memory may be void
                for sequence in range(len(self._held)):
                    self._drop(sequence)
            if len(batch) > 1:
                middle = len(batch) // 2
                return self._answer_together(batch[:middle]) | self._answer_together(batch[middle:])
            return {id(batch[0]): self._failure(batch[0], error)}

    def _failure(self, waiting: _Waiting, error: Exception) -> SpecdecError:
        """Return the error of a question that failed alone, and forget its session."""
        for sequence, held in enumerate(self._held):
            if held.session_id == waiting.rows_request.position.session_id:
                self._drop(sequence)
        if isinstance(error, SpecdecError):
            return error
        _log.error("llama.cpp failed", exc_info=error)
        return Internal(f"llama.cpp failed: {type(error).__name__}")

    def _begin(self, waiting: _Waiting, in_use: Set[int]) -> _Run:
        """Choose the sequence of a question and roll it back to the tokens in common.

        Args:
            waiting: the rows_request.
            in_use: sequences of other questions of the batch.
        """
        rows_request = waiting.rows_request
        sequence = self._sequence_for(rows_request, in_use)
        held = self._held[sequence]
        # The logits after the last wanted prefixes are needed, so their tokens run again.
        keep = min(
            _num_common(held.token_ids, rows_request.token_ids), len(rows_request.token_ids) - rows_request.num_rows
        )
        if not self._context.truncate(sequence, keep):
            self._context.truncate(sequence, 0)
            keep = 0
        held.token_ids, held.used = rows_request.token_ids[:keep], self._num_batches
        return _Run(waiting, sequence, keep)

    def _sequence_for(self, rows_request: RowsRequest, in_use: Set[int]) -> int:
        session_id, tenant = rows_request.position.session_id, rows_request.position.tenant
        for sequence, held in enumerate(self._held):
            if held.session_id == session_id:
                return sequence
        others = (sequence for sequence in range(len(self._held)) if sequence not in in_use)
        free = min(others, key=lambda sequence: self._held[sequence].used)
        source, common = -1, _MIN_COMMON_TOKENS
        for sequence, held in enumerate(self._held):
            num_common = _num_common(held.token_ids, rows_request.token_ids)
            if sequence != free and held.tenant == tenant and num_common > common:
                source, common = sequence, num_common
        self._drop(free)
        if source >= 0:
            self._context.copy(source, free, common)
        tokens = rows_request.token_ids[: common if source >= 0 else 0]
        self._held[free] = _Held(session_id, tenant, tokens, self._num_batches)
        return free

    def _part(self, run: _Run) -> BatchPart:
        tokens = run.rows_request.token_ids[run.start :].tolist()
        return BatchPart(run.sequence, run.start, tokens, run.rows_request.num_rows)

    def _decode(self, runs: Sequence[_Run], parts: Sequence[BatchPart]) -> None:
        """Run one batch; if the memory is full, drop the sequences that no question of this batch uses."""
        in_use = {run.sequence for run in runs}
        while True:
            try:
                all_rows = self._context.decode(parts)
                break
            except ResourceExhausted:
                idle = [each for each, held in enumerate(self._held) if held.session_id and each not in in_use]
                if not idle:
                    raise
                self._drop(min(idle, key=lambda each: self._held[each].used))
        by_sequence = {run.sequence: run for run in runs}
        for part, rows in zip(parts, all_rows, strict=True):
            run = by_sequence[part.sequence]
            self._held[part.sequence].token_ids = run.rows_request.token_ids[: part.start + len(part.token_ids)]
            if part.num_rows:
                run.logits.append(rows)

    def _answer(self, run: _Run) -> _Outcome:
        """Return the answer of a question that has run, or the error of its constraint alone."""
        logits, rows_request = np.concatenate(run.logits)[:, : self.shape.vocabulary_size], run.rows_request
        if np.isnan(logits).any() or not np.isfinite(logits.max(axis=-1)).all():
            raise Internal("llama.cpp returned logits that are not finite")
        masks = rows_request.masks
        if masks is None:
            return Answer(distributions_of(logits, rows_request), num_cached_tokens=run.start)
        if not masks.are_ready(_MASK_PATIENCE_S):
            return _Logits(logits, run.start)
        try:
            legal = masks.future.result()
            return Answer(distributions_of(logits, rows_request, legal.masks), num_cached_tokens=run.start)
        except SpecdecError as error:
            return error

    def _drop(self, sequence: int) -> None:
        self._context.truncate(sequence, 0)
        self._held[sequence] = _Held()


def open_llama(*, model: str, max_context_tokens: int | None, num_threads: int | None) -> LlamaBackend:
    """Load a GGUF file and return its backend.

    Args:
        model: path of the file.
        max_context_tokens: longest session; None for 8192 or the model's limit.
        num_threads: threads of a call; None for all processors.

    Raises:
        InvalidSetting: the file is missing or cannot be loaded.
        Unsupported: the model has recurrent layers, or the package llama-cpp-python is not installed.
    """
    path = Path(model)
    if not path.is_file():
        raise InvalidSetting(f"model: --backend llama-cpp takes a GGUF file, {model} is none", field="model")
    files = read_model_files(model)
    if files.is_recurrent:  # llama.cpp takes back or copies a part of a sequence's KV, but not of its states
        raise Unsupported(
            f"model: {model} has recurrent layers, which --backend llama-cpp does not serve; serve the model's "
            "checkpoint in safetensors files without --backend",
            field="model",
        )
    limit = max_context_tokens or min(_DEFAULT_CONTEXT_TOKENS, files.max_context_tokens or _DEFAULT_CONTEXT_TOKENS)
    options = LlamaOptions(
        num_tokens=max(2 * limit, _BATCH_TOKENS),
        num_sequences=_NUM_SEQUENCES,
        batch_tokens=_BATCH_TOKENS,
        num_threads=num_threads or num_processors(),
    )
    context = LlamaContext(path, options)
    return LlamaBackend(context, _shape(files, path, context, limit))


def _shape(files: ModelFiles, path: Path, context: LlamaContext, limit: int) -> BackendShape:
    return BackendShape(
        backend="llama-cpp",
        engine=f"llama.cpp (llama-cpp-python {context.version})",
        vocabulary_size=files.vocabulary_size,
        vocabulary_fingerprint=files.vocabulary_fingerprint,
        model_fingerprint=_fingerprint_of(path),
        max_context_tokens=min(limit, context.max_context_tokens),
        eos_token_ids=files.eos_token_ids,
        unsupported_fields=(),
        has_whole_rows=True,
    )


def _fingerprint_of(path: Path) -> str:
    """Return a hash of a file's size and of evenly spaced samples: 32 hex digits."""
    size = path.stat().st_size
    digest = hashlib.blake2b(f"llama.cpp {size}".encode(), digest_size=16)
    with path.open("rb") as file:
        for offset in range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _num_common(ours: TokenIds, theirs: TokenIds) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:length] != theirs[:length])
    return int(different[0]) if len(different) else length


def _batches(parts: Sequence[BatchPart], limit: int) -> list[list[BatchPart]]:
    """Divide parts into batches of at most `limit` tokens; a part may be cut, and its rows are those of its end."""
    batches: list[list[BatchPart]] = [[]]
    room = limit
    for part in parts:
        done, num_tokens = 0, len(part.token_ids)
        while done < num_tokens:
            if not room:
                batches.append([])
                room = limit
            taken = min(room, num_tokens - done)
            num_rows = max(0, part.num_rows - (num_tokens - done - taken))
            token_ids = part.token_ids[done : done + taken]
            batches[-1].append(BatchPart(part.sequence, part.start + done, token_ids, min(num_rows, taken)))
            done, room = done + taken, room - taken
    return batches
