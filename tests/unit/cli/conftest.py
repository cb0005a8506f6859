"""A scripted coordinator for command lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest

from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import Script, ScriptedCoordinator, finished, serve, started, tokens

Serve = Callable[..., tuple[ScriptedCoordinator, dict[str, str]]]


@pytest.fixture
def servers() -> Iterator[list[grpc.Server]]:
    """The servers that `coordinator` has started."""
    running: list[grpc.Server] = []
    yield running
    for server in running:
        server.stop(None)


@pytest.fixture
def coordinator(servers: list[grpc.Server]) -> Serve:
    """Starts one that follows the scripts it is given; hands out it and the environment that leads to it."""

    def start(*scripts: Script) -> tuple[ScriptedCoordinator, dict[str, str]]:
        servicer = ScriptedCoordinator(list(scripts))
        server, endpoint = serve(servicer)
        servers.append(server)
        return servicer, {"SPECDEC_ENDPOINT": endpoint}

    return start


def answer(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Two tokens, one of them accepted."""
    sources = "ac" if request.return_provenance else ""
    return [started(request), tokens(0, [1, 2], sources), finished(2, pb.FINISH_REASON_STOP_STRING)]
