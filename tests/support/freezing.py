"""Processes that are stopped as they are, connections and all, and go on afterwards. For tests of hung parts."""

from __future__ import annotations

import asyncio
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
