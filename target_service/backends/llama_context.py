"""A llama.cpp context of several sequences: run tokens, read logits, roll back.

A thin layer over the C interface of the package llama-cpp-python, which the extra llama-cpp installs. Called by
`llama_cpp` from one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import Internal, InvalidSetting, ResourceExhausted, Unsupported
from specdec.contract.version import install_command


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """Sizes of a context."""

    num_tokens: int
    """Number of tokens that all sequences together may hold."""
    num_sequences: int
    batch_tokens: int
    """Largest number of tokens of one call of llama_decode."""
    num_threads: int


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Tokens of one sequence to run in one call."""

    sequence: int
    start: int
    """Position of the first token."""
    token_ids: Sequence[int]
    num_rows: int
    """Number of tokens, counted from the end, whose logits are wanted."""


class LlamaContext:
    """A loaded model and its memory. Use from one thread."""

    def __init__(self, path: Path, options: LlamaOptions) -> None:
        """Load a GGUF file.

        Raises:
            Unsupported: the package is not installed.
            InvalidSetting: llama.cpp cannot load the file.
        """
        self._llama = _import_llama()
        self.options = options
        llama = self._llama
        model_params = llama.llama_model_default_params()
        self._model = llama.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise InvalidSetting(f"model: llama.cpp cannot load {path}", field="model")
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = options.num_tokens, options.num_sequences, True
        params.n_batch = params.n_ubatch = options.batch_tokens
        params.n_threads = params.n_threads_batch = options.num_threads
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            llama.llama_model_free(self._model)
            raise InvalidSetting(
                f"max_context_tokens: llama.cpp cannot allocate {options.num_tokens} tokens", field="max_context_tokens"
            )
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(options.batch_tokens, 0, 1)
        self.num_logits = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model)))
        """Numbers of a row of logits; the tokenizer may have fewer tokens."""
        self.max_context_tokens = int(llama.llama_model_n_ctx_train(self._model))
        self.version = str(llama.__version__)

    def decode(self, parts: Sequence[BatchPart]) -> list[NDArray[np.float32]]:
        """Run the parts, which have `batch_tokens` tokens at most together.

        Returns:
            float32 [num_rows, num_logits] of each part.

        Raises:
            ResourceExhausted: the memory has no room; nothing was run.
            Internal: llama.cpp failed; the memory is void.
        """
        rows = self._fill(parts)
        status = self._llama.llama_decode(self._context, self._batch)
        if status == 1:
            raise ResourceExhausted("the KV memory of llama.cpp is full", reason="KV_EXHAUSTED")
        if status:
            raise Internal(f"llama_decode failed with status {status}")
        return [np.stack([self._row(index) for index in indices]) if indices else _NO_ROWS for indices in rows]

    def truncate(self, sequence: int, length: int) -> bool:
        """Drop the tokens of a sequence from a position on; return False if the model's memory cannot."""
        return bool(self._llama.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def copy(self, source: int, destination: int, length: int) -> None:
        """Let a sequence begin with the first tokens of another one."""
        self._llama.llama_memory_seq_cp(self._memory, source, destination, 0, length)

    def close(self) -> None:
        """Free the model and its memory."""
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)

    def _fill(self, parts: Sequence[BatchPart]) -> list[range]:
        """Write the parts into the batch; return the batch indices of each part's rows."""
        batch, index, rows = self._batch, 0, []
        for part in parts:
            for offset, token_id in enumerate(part.token_ids):
                batch.token[index] = token_id
                batch.pos[index] = part.start + offset
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, part.sequence
                batch.logits[index] = offset >= len(part.token_ids) - part.num_rows
                index += 1
            rows.append(range(index - part.num_rows, index))
        batch.n_tokens = index
        return rows

    def _row(self, index: int) -> NDArray[np.float32]:
        pointer = self._llama.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, shape=(self.num_logits,)).copy()


_NO_ROWS: NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)


def _import_llama() -> Any:
    try:
        import llama_cpp
    except ImportError as error:
        raise Unsupported(
            f"backend: --backend llama-cpp needs the package llama-cpp-python: run {install_command('llama-cpp')}",
            field="backend",
        ) from error
    _silence(llama_cpp)
    llama_cpp.llama_backend_init()
    return llama_cpp


def _silence(llama: Any) -> None:
    """Drop the log of llama.cpp, which writes hundreds of lines to stderr while it loads."""
    callback = llama.llama_log_callback(lambda level, text, user: None)
    _KEPT.append(callback)
    llama.llama_log_set(callback, ctypes.c_void_p(0))


#: Callbacks that llama.cpp may still call.
_KEPT: list[Any] = []
