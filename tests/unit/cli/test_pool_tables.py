"""The tables of `specdec status` and `specdec pools`."""

from __future__ import annotations

import json
import os
import pty
import struct
import subprocess
import sys
from fcntl import ioctl
from termios import TIOCSWINSZ

import pytest

from specdec.cli.__main__ import run
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scripted_coordinator import pool
from tests.unit.cli.conftest import Serve, answer


def served_pair() -> pb.GetInfoResponse:
    info = pb.GetInfoResponse(
        version="9", target_model="/models/[bold]m", max_context_tokens=512, max_gamma=8,
        pools=[pool("draft", 2, alpha=0.75, gamma=3.5, dtype="bfloat16"), pool("target", dtype="float32")],
    )  # fmt: skip
    info.pools[0].model = "/a/long/path/to/draft-model"
    info.pools[1].replicas[0].num_sessions = 7
    info.pools[1].replicas[0].kv_usage = 0.25
    info.coordinator_id = "c-1"
    return info


def test_status_lists_pools_and_replicas(coordinator: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    servicer, environ = coordinator(answer)
    servicer.served = served_pair()
    assert run(["status"], environ) == 0
    title, _, pools, draft, target, _, replicas, first, second, third, own = capsys.readouterr().out.splitlines()
    assert title == "specdec 9 serves [bold]m: context 512 tokens, at most 8 draft tokens a step"
    assert pools.split() == ["role", "pool", "model", "dtype", "accepted", "draft", "length"]
    assert draft.split() == ["draft", "default", "draft-model", "bfloat16", "75%", "measured", "3.5", "tokens/step"]
    assert target.split() == ["target", "default", "target-model", "float32"]
    assert replicas.split() == ["role", "pool", "replica", "address", "sessions", "KV", "used"]
    assert first.split() == ["draft", "default", "draft-0", "h0:1", "0", "0%"]
    assert second.split() == ["draft", "default", "draft-1", "h1:1", "0", "0%"]
    assert third.split() == ["target", "default", "target-0", "h0:1", "7", "25%"]
    assert own.split() == ["coordinator", "c-1"]


def test_status_before_the_first_draft_says_that_the_figures_are_not_known(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    servicer.served = pb.GetInfoResponse(pools=[pool("draft", 0), pool("target")])
    assert run(["status"], environ) == 0
    assert capsys.readouterr().out.count("not known yet") == 2


def test_status_json_has_the_servers_fields(coordinator: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    servicer, environ = coordinator(answer)
    servicer.served = pb.GetInfoResponse(version="9", pools=[pool("draft", dtype="int8")])
    assert run(["status", "--json"], environ) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["version"] == "9"
    draft = shown["pools"][0]
    assert (draft["role"], draft["alpha"], draft["dtype"], draft["shadow"]) == ("draft", None, "int8", False)
    assert draft["replicas"][0]["replica_id"] == "draft-0"


def test_status_warns_when_no_target_replica_is_alive(coordinator: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    servicer, environ = coordinator(answer)
    servicer.served = pb.GetInfoResponse(pools=[pool("draft")])
    assert run(["status"], environ) == 0
    assert "no target replica is alive" in capsys.readouterr().err


def run_in_terminal(command: str, environ: dict[str, str], num_columns: int) -> list[str]:
    """Return the lines that a command prints in a terminal of this width."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 50, num_columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec.cli", command], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
        env={**os.environ, **environ, "NO_COLOR": "1", "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # Linux reports the end of the other side as an error
        pass
    os.close(ours)
    assert process.wait(60) == 0
    return shown.decode().splitlines()


@pytest.mark.parametrize("command", ["status", "pools"])
def test_tables_fit_a_terminal_of_80_columns(command: str, coordinator: Serve) -> None:
    servicer, environ = coordinator(answer)
    servicer.served = served_pair()
    servicer.served.pools[0].routes.add(
        request_class="code/rejection/greedy", alpha=0.5, goodput=419.0, weight=1, share=1, is_chosen=True
    )
    servicer.served.pools[0].replicas[0].replica_id = "draft-default-0123456789abcdef"
    lines = run_in_terminal(command, environ, 80)
    assert "measured" in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_pools_tell_measured_from_predicted_acceptance_and_name_a_shadow(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    code, candidate = pool("draft", alpha=0.64), pool("draft", alpha=0.59, shadow=True)
    code.name, candidate.name = "code", "candidate"
    code.routes.add(request_class="code/rejection/warm", alpha=0.67, goodput=419.4, weight=0.6, share=1, is_chosen=True)
    candidate.routes.add(request_class="code/rejection/warm", alpha=0.6, goodput=402.0, weight=0.4)
    servicer.served = pb.GetInfoResponse(pools=[code, candidate, pool("target")])
    assert run(["pools"], environ) == 0
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["pool", "requests", "accepted", "predicted", "tokens/s", "weight", "share"]
    assert rows == [
        ["code", "all", "64%", "measured"],
        ["code/rejection/warm", "67%", "measured", "419", "0.60", "100%", "chosen"],
        ["candidate", "all", "59%", "predicted", "shadow"],
        ["code/rejection/warm", "60%", "predicted", "402", "0.40", "0%"],
    ]
