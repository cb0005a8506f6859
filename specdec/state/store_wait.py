"""Waits at a service's start for a Redis that does not answer yet. Called by the services' main modules."""

from __future__ import annotations

import asyncio
import logging
import time

from specdec.contract.errors import Unavailable
from specdec.state.connection import RedisConnection

#: Pause between two attempts.
PAUSE_S = 0.5

_log = logging.getLogger(__name__)


async def store_answers(url: str, wait_s: float, stop: asyncio.Event) -> bool:
    """Wait for a store as `wait_for_store`, or until `stop`; return False for a stop."""
    waiting = asyncio.create_task(wait_for_store(url, wait_s), name="wait for the store")
    tasks = {waiting, asyncio.create_task(stop.wait())}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if waiting in done:
            waiting.result()
        return not stop.is_set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def wait_for_store(url: str, wait_s: float) -> None:
    """Return once the Redis at a URL answers. The first failure is logged, and so is the end of the wait.

    Args:
        url: a URL of `specdec.settings.redis_url`.
        wait_s: time after which the last failure is raised; 0: one attempt is made.

    Raises:
        InvalidSetting: the URL does not fit what answers there, or its user may not use it. It is not waited for.
        Unavailable: the store did not answer in time.
    """
    began_s = time.monotonic()
    has_told = False
    connection = RedisConnection(url)
    try:
        while True:
            try:
                await connection.check()
                break
            except Unavailable as error:
                if time.monotonic() - began_s + PAUSE_S > wait_s:
                    raise
                if not has_told:
                    has_told = True
                    _log.warning("waiting for the store for at most %g s: %s", wait_s, error.message)
            await asyncio.sleep(PAUSE_S)
    finally:
        await connection.close()
    if has_told:
        _log.info("the store answers", extra={"waited_s": round(time.monotonic() - began_s, 1)})
