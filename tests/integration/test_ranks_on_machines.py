"""Ranks of one replica that start by themselves on machines of their own, as the pods of a LeaderWorkerSet do."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from tests.support.machines import Machines, unable
from tests.support.process_template import ENVIRON
from tests.support.stack import START_TIMEOUT_S, free_port, is_serving
from tests.support.tiny_models import build_tiny_model

STORE_PORT, GRPC_PORT = 29500, 50071
#: A rank that waits for ever would end no test.
PATIENCE_S = 240.0


def start_rank(
    ending: ExitStack, rank: int, host: str, port: int, flags: Sequence[str], prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start a rank with the command of `k8s/components/multi-node`; `host` is the first rank's."""
    place = [f"--rank={rank}", "--world-size=2", f"--store-host={host}", f"--store-port={port}", "--local-rank=0"]
    command = [*prefix, sys.executable, "-m", "specdec.service.rank", "target", *place, "--", *flags]
    process = subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    ending.callback(process.wait)
    ending.callback(process.kill)
    return process


def lines_until(output: IO[str] | None, last: str) -> list[str]:
    assert output is not None
    lines = []
    for line in output:
        lines.append(line.strip())
        if lines[-1] == last:
            break
    return lines


@pytest.mark.skipif(bool(unable()), reason=unable())
def test_two_machines_serve_one_model_and_the_first_rank_ends_with_the_second(tmp_path: Path) -> None:
    model = build_tiny_model("llama", tmp_path, num_layers=1)
    with Machines("first", "second") as machines, ExitStack() as ending:
        host = machines.address("first")
        flags = ["--model", str(model), "--redis-url", "memory://", "--device", "cpu", "--insecure"]
        ranks = []
        for rank, name in ((1, "second"), (0, "first")):  # the other rank waits for the first
            listen = ["--listen", f"{machines.address(name)}:{GRPC_PORT}"]
            prefix = [*machines.command(name), "env", f"GLOO_SOCKET_IFNAME={machines.interface(name)}"]
            ranks.append(start_rank(ending, rank, host, STORE_PORT, [*flags, *listen], prefix))
        second, first = ranks
        assert lines_until(first.stdout, "serving") == [f"store {STORE_PORT}", "serving"]
        assert is_serving(f"{host}:{GRPC_PORT}", timeout_s=START_TIMEOUT_S)
        second.kill()
        assert first.wait(PATIENCE_S) == 1


@pytest.mark.full
def test_ranks_find_each_other_at_an_address_of_ipv6(tmp_path: Path) -> None:
    model = build_tiny_model("llama", tmp_path, num_layers=1)
    flags = ["--model", str(model), "--redis-url", "memory://", "--device", "cpu", "--listen", "127.0.0.1:0"]
    with ExitStack() as ending:
        port = free_port()
        first, second = (start_rank(ending, rank, "::1", port, flags) for rank in (0, 1))
        assert lines_until(first.stdout, "serving")[-1] == "serving"
        first.terminate()
        assert [rank.wait(PATIENCE_S) for rank in (first, second)] == [0, 0]


def test_a_port_in_use_is_the_first_ranks_error_line(tmp_path: Path) -> None:
    with ExitStack() as ending:
        taken = ending.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = taken.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "specdec.service.rank",
            "target",
            f"--store-port={port}",
            "--world-size=2",
            "--",
        ]
        result = subprocess.run([*command, "--model", str(tmp_path)], capture_output=True, text=True, env=ENVIRON)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
