"""The coordinator's end of `text_child`: asks it, waits for it, and ends it when nobody waits for it.

A child answers one question at a time. Whoever asks with a conversation that makes the template slow delays other
conversations, for as long as a template may run at most, and never streams. Not here: what is asked (`tokenizer`).
"""

from __future__ import annotations

import asyncio
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from coordinator.text.text_child import TEMPLATE_CPU_S, read_message, write_message
from specdec.errors import InvalidRequest, Unavailable

_CHILD = Path(__file__).with_name("text_child.py")
#: After a text of this many characters the child ends: its memory grew by hundreds of bytes a character.
_LARGE_TEXT_CHARACTERS = 1 << 20
#: How soon one who waits notices that the call was given up.
_NOTICE_S = 0.05

ResultT = TypeVar("ResultT")


async def in_thread(work: Callable[..., ResultT], *args: Any, **options: Any) -> ResultT:
    """`asyncio.to_thread` for work that takes `given_up`. Cancelled, as calls are at their end, it ends the work."""
    given_up = threading.Event()
    try:
        return await asyncio.to_thread(work, *args, given_up=given_up, **options)
    finally:
        given_up.set()


class GivenUp(Exception):
    """The call this was for is over; nobody will see this."""


class TextProcess:
    """Starts the child when it is first asked, and again after it was ended. Safe to share between threads."""

    def __init__(self, setting: Mapping[str, Any]) -> None:
        """
        Args:
            setting: what `text_child` is told first: `model`, `template`, `special_tokens`.
        """
        self._setting = setting
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., TextProcess] | None = None

    def ask(self, request: Mapping[str, Any], field: str, given_up: threading.Event) -> Any:
        """The child's answer to a request for `messages` or for a `text`. Blocks: call it in a thread.

        Raises:
            InvalidRequest: the child could not do it; `field` is at fault.
            GivenUp: `given_up` was set meanwhile.
            Unavailable: there is no child, and none can be started.
        """
        while not self._lock.acquire(timeout=_NOTICE_S):
            _check(given_up)
        try:
            answer = self._exchange(request, given_up)
        finally:
            self._lock.release()
        what = "the chat template" if "messages" in request else "the tokenizer"
        if answer is None:
            limit = f"took more than {TEMPLATE_CPU_S:g} s or " if "messages" in request else ""
            raise InvalidRequest(f"{what} cannot take {field}: it {limit}ended its process", field=field)
        if "error" in answer:
            raise InvalidRequest(f"{what} refuses {field}: {answer['error']}", field=field)
        return answer

    def close(self) -> None:
        """Ends the child. Idempotent."""
        with self._lock:
            self._end()

    def _exchange(self, request: Mapping[str, Any], given_up: threading.Event) -> Any:
        """The answer; None when the child ended instead."""
        _check(given_up)
        answer = None
        try:
            process = self._live_process() or self._start()
            assert process.stdin is not None  # both were opened
            assert process.stdout is not None
            write_message(process.stdin, request)
            waiting = select.poll()  # not select.select, which refuses descriptors past 1024
            waiting.register(process.stdout, select.POLLIN)
            while not waiting.poll(_NOTICE_S * 1000):
                _check(given_up)
            answer = read_message(process.stdout)
        except OSError:  # it ended before it had read the request
            pass
        finally:
            if answer is None or len(request.get("text", "")) > _LARGE_TEXT_CHARACTERS:
                self._end()
        return answer

    def _live_process(self) -> subprocess.Popen[bytes] | None:
        """The child, unless somebody else has ended it since the last answer."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a panic of the tokenizer says so in several lines
                start_new_session=True,  # Ctrl-C is for the coordinator, whose end ends it
            )
        except OSError as error:
            raise Unavailable(f"the tokenizer's process cannot be started: {error.strerror}") from error
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        assert process.stdin is not None  # it was opened above
        write_message(process.stdin, self._setting)
        return process

    def _end(self) -> None:
        self._process = None
        if self._finalizer is not None:
            self._finalizer()  # once


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            try:
                pipe.close()
            except OSError:  # what was not written any more
                continue


def _check(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise GivenUp
