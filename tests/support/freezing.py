"""Processes that are stopped as they are, connections and all, and go on afterwards. For tests of hung parts."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from tests.support.stack import Stack


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process stands still within."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17  # ptrace(2)
_WALL = 0x40000000  # waitpid(2): threads too


@contextmanager
def frozen_thread(thread_id: int) -> Iterator[None]:
    """One thread of a child process stands still within; the others run on. Raises OSError where that is forbidden."""
    _trace(_SEIZE, thread_id)
    try:
        _trace(_INTERRUPT, thread_id)
        os.waitpid(thread_id, _WALL)
        yield
    finally:
        _trace(_DETACH, thread_id)


def _trace(request: int, thread_id: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(request, thread_id, None, None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def frozen_part(stack: Stack, name: str) -> Iterator[None]:
    """A part of a stack stands still within."""
    process = stack.parts[name].process
    assert process is not None
    with frozen(process.pid):
        yield


@asynccontextmanager
async def stuttering(send: Callable[[int], object], *, still_s: float, running_s: float) -> AsyncIterator[None]:
    """A process stands still for `still_s` and runs for `running_s`, in turns, within; `send` sends it a signal."""

    async def stutter() -> None:
        while True:
            send(signal.SIGSTOP)
            await asyncio.sleep(still_s)
            send(signal.SIGCONT)
            await asyncio.sleep(running_s)

    task = asyncio.create_task(stutter())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        send(signal.SIGCONT)
