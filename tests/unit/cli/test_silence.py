"""A stream without tokens reports on stderr which part of the system it waits for."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.cli.__main__ import run
from specdec.cli.silence import SilenceWatch
from specdec.client import Budgets, Client
from specdec.errors import Unavailable
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import ScriptedCoordinator, pool, serve
from tests.unit.cli.conftest import answer

PATIENCE_S = 0.02


class Asked(ScriptedCoordinator):
    """Counts the calls of GetInfo."""

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


def own_stderr() -> contextlib.redirect_stderr[io.StringIO]:
    """Redirect stderr to a buffer that can be read while another thread writes, which capsys does not allow."""
    return contextlib.redirect_stderr(io.StringIO())


def said(stderr: io.StringIO, num_lines: int) -> list[str]:
    """Return the lines on stderr once there are `num_lines`."""
    while stderr.getvalue().count("\n") < num_lines:
        time.sleep(0.005)
    return stderr.getvalue().splitlines()


def test_a_lost_target_is_reported_once_per_silence(clients: Any) -> None:
    servicer = Asked(pool("draft"))
    with own_stderr() as stderr, SilenceWatch(clients(servicer), patience_s=PATIENCE_S) as watch:
        assert said(stderr, 1) == ["target lost, waiting"]
        servicer.wait_asked(1)
        watch.heard()
        assert said(stderr, 2) == ["target lost, waiting"] * 2
        servicer.wait_asked(1)
    assert not servicer._asked.acquire(blocking=False)  # once for each silence


def test_a_long_prompt_is_no_loss(clients: Any) -> None:
    servicer = Asked(pool("draft"), pool("target"))
    with own_stderr() as stderr, SilenceWatch(clients(servicer), patience_s=PATIENCE_S):
        servicer.wait_asked(3)
    assert stderr.getvalue() == ""


def test_a_stream_that_speaks_is_not_asked_about(clients: Any) -> None:
    servicer = Asked()
    now_s = iter(range(10**9))
    clock = threading.Lock()

    def still() -> float:
        with clock:
            next(now_s)
        return 0.0  # always just heard

    with SilenceWatch(clients(servicer), patience_s=PATIENCE_S, clock=still):
        while next(now_s) < 5:
            threading.Event().wait(PATIENCE_S)
    assert not servicer._asked.acquire(blocking=False)


def test_a_lost_coordinator_is_reported() -> None:
    with (
        own_stderr() as stderr,
        Client("127.0.0.1:1", budgets=Budgets(connect_s=0)) as client,
        SilenceWatch(client, patience_s=PATIENCE_S),
    ):
        assert said(stderr, 1) == ["coordinator lost, waiting"]


def test_a_request_while_the_target_restarts_waits_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = Unavailable("no target replica can be reached", retry_after_s=0.7)
    servicer = ScriptedCoordinator([*[lambda request: [gone]] * 5, answer], served=pb.GetInfoResponse())
    server, endpoint = serve(servicer)
    assert run(["generate", "hi", "--endpoint", endpoint], {}) == 0
    server.stop(None)
    captured = capsys.readouterr()
    assert captured.out == "<1><2>\n"
    assert captured.err.startswith("target lost, waiting\n")
    assert len({request.request_id for request in servicer.requests}) == 1
