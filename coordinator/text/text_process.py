"""Starts `text_child`, sends it requests, and kills it when the caller gives up.

The child answers one request at a time. A conversation that makes the template slow delays other conversations, for at
most the time limit of a template, and never delays streams. Children are forked from a process that has imported what
they use, so a killed child is replaced in milliseconds. `tokenizer` and `constraints` make the requests.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import IO, Any, TypeVar

from coordinator.text.text_child import CONSTRAINT_CPU_S, TEMPLATE_CPU_S, read_message, write_message
from specdec.contract.errors import InvalidRequest, Unavailable
from specdec.supervision.forked_process import ForkedProcess
from specdec.supervision.process_template import Command, Streams, TemplateFailed, shared_template
from specdec.supervision.service_process import python_path

_CHILD = "coordinator.text.text_child"
#: Modules that the children use, which take a second to import. All children of this process share one import.
_PRELOADED = (
    "coordinator.text.message_forms", "specdec.structured.admission", "transformers.tokenization_utils_tokenizers",
    "transformers.utils.chat_template_utils",
)  # fmt: skip
#: The child is ended after a text of more characters than this, because its memory has grown by hundreds of bytes a
#: character.
_LARGE_TEXT_CHARACTERS = 1 << 20
#: Interval at which a waiting thread checks whether the call was given up.
_NOTICE_S = 0.05

#: Time for which the answer to a constraint is awaited after its call was given up. Its compilation has a limit, and a
#: new child would have to build its table of tokens again, for which the next constraint would wait.
_PATIENCE_S = 2.0
#: Time for which the import of the template of processes is awaited before a plain process is started instead.
_IMPORT_PATIENCE_S = 5.0
#: Threads that wait for a child. The event loop's own are few, and other work of requests needs them.
_THREADS = ThreadPoolExecutor(64, thread_name_prefix="specdec-text")

ResultT = TypeVar("ResultT")


async def in_thread(work: Callable[..., ResultT], *args: Any, **options: Any) -> ResultT:
    """Run work that takes `given_up` in a thread. Cancelling this call, as the end of a request does, ends the work."""
    given_up = threading.Event()
    try:
        loop, context = asyncio.get_running_loop(), copy_context()
        return await loop.run_in_executor(_THREADS, partial(context.run, work, *args, given_up=given_up, **options))
    finally:
        given_up.set()


class GivenUp(Exception):
    """The call that needed the result is over, so no caller sees this error."""


_Child = subprocess.Popen[bytes] | ForkedProcess


class TextProcess:
    """Starts the child at the first request, and again after it was ended. Safe to share between threads."""

    def __init__(self, setting: Mapping[str, Any]) -> None:
        """
        Args:
            setting: first message to `text_child`: `model`, `template`, `special_tokens`.
        """
        self._setting = setting
        self._lock = threading.Lock()
        self._process: _Child | None = None
        self._finalizer: weakref.finalize[..., TextProcess] | None = None
        self._was_killed = False
        """True if another process, or the kernel for want of memory, killed the child before its last answer."""

    def ask(self, request: Mapping[str, Any], field: str, given_up: threading.Event) -> Any:
        """Return the child's answer to a request with `messages`, a `text` or a `constraint`.

        Blocks, so call it in a thread.

        Raises:
            InvalidRequest: the child cannot process the content of `field`.
            GivenUp: `given_up` was set in the meantime.
            Unavailable: the child cannot be started.
        """
        while not self._lock.acquire(timeout=_NOTICE_S):
            _check(given_up)
        try:
            answer = self._exchange(request, given_up)
            if answer is None and self._was_killed:  # not by its own limits, so the request need not be at fault
                answer = self._exchange(request, given_up)
        finally:
            self._lock.release()
        if "constraint" in request:
            return _checked_compilation(answer, field)
        what = "the chat template" if "messages" in request else "the tokenizer"
        if answer is None:
            limit = f"took more than {TEMPLATE_CPU_S:g} s or " if "messages" in request else ""
            raise InvalidRequest(f"{what} cannot take {field}: it {limit}ended its process", field=field)
        if "error" in answer:
            raise InvalidRequest(f"{what} refuses {field}: {answer['error']}", field=field)
        if (index := answer.get("left_out")) is not None:
            role = ascii(request["messages"][index]["role"])[:64]
            raise InvalidRequest(
                f"messages[{index}] would be missing from the prompt: {what} ignores it in the role {role}; leave it "
                "out, or send it in a role that the model's template reads",
                field=f"messages[{index}]",
            )
        return answer

    def close(self) -> None:
        """End the child. Idempotent."""
        with self._lock:
            self._end()

    def _exchange(self, request: Mapping[str, Any], given_up: threading.Event) -> Any:
        """Return the answer; None if the child ended without one."""
        _check(given_up)
        answer, self._was_killed = None, False
        try:
            process = self._live_process() or self._start(given_up)
            assert process.stdin is not None  # `_start` opened both
            assert process.stdout is not None
            write_message(process.stdin, request)
            waiting = select.poll()  # select.select would refuse descriptors above 1024
            waiting.register(process.stdout, select.POLLIN)
            patience_s = _PATIENCE_S if "constraint" in request else 0.0
            while not waiting.poll(_NOTICE_S * 1000):
                if given_up.is_set() and (patience_s := patience_s - _NOTICE_S) < 0.0:
                    raise GivenUp
            answer = read_message(process.stdout)
            self._was_killed = answer is None and self._is_killed()
        except OSError:  # the child ended before it read the request
            self._was_killed = self._is_killed()
        finally:
            if answer is None or len(request.get("text", "")) > _LARGE_TEXT_CHARACTERS:
                self._end()
        return answer

    def _is_killed(self) -> bool:
        """Return whether the child, which has closed a pipe, ended by SIGKILL."""
        try:
            return self._process is not None and self._process.wait(_PATIENCE_S) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False

    def _live_process(self) -> _Child | None:
        """Return the child if it still runs; another process may have killed it since the last answer."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        return self._process

    def _start(self, given_up: threading.Event) -> _Child:
        try:
            process = _forked(given_up) or subprocess.Popen(
                [sys.executable, "-P", "-m", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a panic of the tokenizer prints several lines
                env=_environ(),
                start_new_session=True,  # Ctrl-C must reach only the coordinator, which ends the child
            )
        except OSError as error:
            raise Unavailable(f"the tokenizer's process cannot be started: {error.strerror}") from error
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        assert process.stdin is not None  # `Popen` and `_forked` opened it
        write_message(process.stdin, {**self._setting, "template_cpu_s": TEMPLATE_CPU_S})
        return process

    def _end(self) -> None:
        self._process = None
        if self._finalizer is not None:
            self._finalizer()  # once


def _checked_compilation(answer: Any, field: str) -> Any:
    """Return the answer for a compiled constraint. Raises InvalidRequest for one that could not be compiled."""
    if answer is None:
        answer = {"error": f"{field} took more than {CONSTRAINT_CPU_S:g} s or too much memory to compile; simplify it"}
    if "error" in answer:
        told = str(answer["error"])
        told = told if told.startswith(field) else f"{field} cannot be compiled: {told}"
        raise InvalidRequest(told, reason="CONSTRAINT_INVALID", field=field)
    return answer


def _forked(given_up: threading.Event) -> ForkedProcess | None:
    """Return a child from the template of processes; None if a plain process must be started."""
    template = shared_template(_PRELOADED, _environ())
    if template is None:
        return None
    until_s = time.monotonic() + _IMPORT_PATIENCE_S
    while not template.is_ready:
        if time.monotonic() > until_s:
            return None
        _check(given_up)
        given_up.wait(_NOTICE_S)
    theirs_in, ours_in = _pipe()
    ours_out, theirs_out = _pipe()
    with theirs_in, theirs_out, open(os.devnull, "wb") as nothing:
        try:
            process = template.start(
                Command(_CHILD, [], _environ(), own_session=True), Streams(theirs_in, theirs_out, nothing)
            )
        except TemplateFailed:
            ours_in.close()
            ours_out.close()
            return None
    process.stdin, process.stdout = ours_in, ours_out
    return process


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """Return the two ends of a pipe, the one to read first."""
    reader, writer = os.pipe()
    return open(reader, "rb"), open(writer, "wb")


def _environ() -> dict[str, str]:
    """Return the environment of a child. NumPy would start threads, which a template must not have."""
    return {**os.environ, "PYTHONPATH": python_path(os.environ), "OPENBLAS_NUM_THREADS": "1"}


def _end(process: _Child) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            try:
                pipe.close()
            except OSError:  # the pipe held a request that the child did not read
                continue


def _check(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise GivenUp
