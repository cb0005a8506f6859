"""The queue of commands in which the device thread sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from specdec.engine.loop.inbox import Inbox

PATIENCE_S = 30.0


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    """Yield an inbox, which is closed at the end, so that no thread waits in it."""
    made = Inbox()
    yield made
    made.close()


@pytest.fixture
def device_thread(inbox: Inbox) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool
        inbox.close()


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.001)


def test_commands_are_run_in_their_order_and_counted(inbox: Inbox) -> None:
    ran: list[int] = []
    for index in range(3):
        assert inbox.post(lambda index=index: ran.append(index))
    before = inbox.progress
    assert inbox.run_commands(None, may_end=True)  # without a sleep
    assert ran == [0, 1, 2]
    assert inbox.progress == before + 3
    assert inbox.run_commands(0.0, may_end=True)
    assert ran == [0, 1, 2]


def test_a_command_ends_the_sleep_and_is_work_until_the_next_one(
    inbox: Inbox, device_thread: ThreadPoolExecutor
) -> None:
    assert inbox.has_work  # the thread does not sleep yet
    begun, may_end = threading.Event(), threading.Event()

    def command() -> None:
        begun.set()
        assert may_end.wait(PATIENCE_S)

    turn = device_thread.submit(inbox.run_commands, None, may_end=True)
    wait_until(lambda: not inbox.has_work)
    inbox.post(command)
    assert inbox.has_work  # at once, even if the thread never wakes
    assert begun.wait(PATIENCE_S)
    assert inbox.has_work
    may_end.set()
    assert turn.result(PATIENCE_S)
    device_thread.submit(inbox.run_commands, None, may_end=True)
    wait_until(lambda: not inbox.has_work)


def test_a_sleep_lasts_no_longer_than_the_patience(inbox: Inbox, device_thread: ThreadPoolExecutor) -> None:
    turn = device_thread.submit(inbox.run_commands, 0.05, may_end=True)
    assert turn.result(PATIENCE_S)
    assert inbox.has_work


def test_a_closed_inbox_refuses_commands_and_ends_the_thread_once_no_call_runs(
    inbox: Inbox, device_thread: ThreadPoolExecutor
) -> None:
    ran: list[str] = []
    turn = device_thread.submit(inbox.run_commands, None, may_end=True)
    wait_until(lambda: not inbox.has_work)
    inbox.close()
    assert not turn.result(PATIENCE_S)
    assert inbox.is_closed
    assert not inbox.post(lambda: ran.append("refused"))
    assert inbox.post(lambda: ran.append("accepted"), even_closed=True)
    assert inbox.run_commands(None, may_end=True)
    assert ran == ["accepted"]
    assert not inbox.run_commands(None, may_end=True)
    # A call that runs still awaits commands.
    turn = device_thread.submit(inbox.run_commands, None, may_end=False)
    wait_until(lambda: not inbox.has_work)
    assert inbox.post(lambda: ran.append("late"), even_closed=True)
    assert turn.result(PATIENCE_S)
    assert ran == ["accepted", "late"]
