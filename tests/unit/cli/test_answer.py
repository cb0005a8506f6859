"""Reports about the part of the system that a silent stream waits for."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.cli.__main__ import run
from specdec.cli.answer import SilenceWatch
from specdec.client import Budgets, Client
from specdec.contract.errors import Unavailable
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import ScriptedCoordinator, pool, serve
from tests.unit.cli.conftest import answer

SILENCE_S = 0.02


class CountingCoordinator(ScriptedCoordinator):
    """Counts the GetInfo calls."""

    def __init__(self, *pools: pb.PoolInfo) -> None:
        super().__init__([], served=pb.GetInfoResponse(pools=pools))
        self._asked = threading.Semaphore(0)

    def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:  # noqa: N802
        self._asked.release()
        return super().GetInfo(request, context)

    def wait_asked(self, times: int) -> None:
        for _ in range(times):
            assert self._asked.acquire(timeout=60)


@pytest.fixture
def clients() -> Iterator[Any]:
    opened: list[tuple[Any, Client]] = []

    def connect(servicer: ScriptedCoordinator) -> Client:
        server, endpoint = serve(servicer)
        opened.append((server, Client(endpoint)))
        return opened[-1][1]

    yield connect
    for server, client in opened:
        client.close()
        server.stop(None)


def redirected_stderr() -> contextlib.redirect_stderr[io.StringIO]:
    """Return a standard error that can be read while another thread writes to it, which pytest's cannot."""
    return contextlib.redirect_stderr(io.StringIO())


def reported(stderr: io.StringIO, num_lines: int) -> list[str]:
    """Wait for this number of lines and return them."""
    while stderr.getvalue().count("\n") < num_lines:
        time.sleep(0.005)
    return stderr.getvalue().splitlines()


def test_a_lost_target_is_reported_once_per_silence(clients: Any) -> None:
    servicer = CountingCoordinator(pool("draft"))
    with redirected_stderr() as stderr, SilenceWatch(clients(servicer), silence_s=SILENCE_S) as watch:
        assert reported(stderr, 1) == ["target lost, waiting for it to come back"]
        servicer.wait_asked(1)
        watch.heard()
        assert reported(stderr, 2) == ["target lost, waiting for it to come back"] * 2
        servicer.wait_asked(1)
    assert not servicer._asked.acquire(blocking=False)  # one report per silence


def test_a_long_silence_with_a_live_target_reports_nothing(clients: Any) -> None:
    servicer = CountingCoordinator(pool("draft"), pool("target"))
    with redirected_stderr() as stderr, SilenceWatch(clients(servicer), silence_s=SILENCE_S):
        servicer.wait_asked(3)
    assert stderr.getvalue() == ""


def test_nothing_is_asked_while_chunks_arrive(clients: Any) -> None:
    servicer = CountingCoordinator()
    now_s = iter(range(10**9))
    clock = threading.Lock()

    def frozen_clock() -> float:
        with clock:
            next(now_s)
        return 0.0  # the last chunk is always new

    with SilenceWatch(clients(servicer), silence_s=SILENCE_S, clock=frozen_clock):
        while next(now_s) < 5:
            threading.Event().wait(SILENCE_S)
    assert not servicer._asked.acquire(blocking=False)


def test_a_lost_coordinator_is_reported() -> None:
    with (
        redirected_stderr() as stderr,
        Client("127.0.0.1:1", budgets=Budgets(connect_s=0)) as client,
        SilenceWatch(client, silence_s=SILENCE_S),
    ):
        assert reported(stderr, 1) == ["coordinator lost, waiting for it to come back"]


def test_generate_waits_for_a_target_that_restarts_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = Unavailable("no target replica can be reached", retry_after_s=0.7)
    servicer = ScriptedCoordinator([*[lambda request: [gone]] * 5, answer], served=pb.GetInfoResponse())
    server, endpoint = serve(servicer)
    assert run(["generate", "hi", "--endpoint", endpoint], {}) == 0
    server.stop(None)
    captured = capsys.readouterr()
    assert captured.out == "<1><2>\n"
    assert captured.err.startswith("target lost, waiting for it to come back\n")
    assert len({request.request_id for request in servicer.requests}) == 1
