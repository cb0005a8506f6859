"""What a silent stream says it waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.cli.silence import SilenceWatch
from specdec.client import Budgets, Client
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import ScriptedCoordinator, pool, serve

PATIENCE_S = 0.02


class Asked(ScriptedCoordinator):
    """Counts the questions about what is served."""

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


def said(capsys: pytest.CaptureFixture[str], lines: int) -> str:
    """Waits for so many lines on stderr."""
    text = ""
    while text.count("\n") < lines:
        text += capsys.readouterr().err
    return text


def test_a_target_that_is_gone_is_told_once_for_each_silence(clients: Any, capsys: pytest.CaptureFixture[str]) -> None:
    servicer = Asked(pool("draft"))
    with SilenceWatch(clients(servicer), patience_s=PATIENCE_S) as watch:
        assert said(capsys, 1) == "target lost, waiting\n"
        watch.heard()
        assert said(capsys, 1) == "target lost, waiting\n"
    assert capsys.readouterr().err == ""


def test_a_long_prompt_is_no_loss(clients: Any, capsys: pytest.CaptureFixture[str]) -> None:
    servicer = Asked(pool("draft"), pool("target"))
    with SilenceWatch(clients(servicer), patience_s=PATIENCE_S):
        servicer.wait_asked(3)
    assert capsys.readouterr().err == ""


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


def test_a_coordinator_that_is_gone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        Client("127.0.0.1:1", budgets=Budgets(connect_s=0)) as client,
        SilenceWatch(client, patience_s=PATIENCE_S),
    ):
        assert said(capsys, 1) == "coordinator lost, waiting\n"
