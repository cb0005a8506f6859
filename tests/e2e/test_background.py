"""`specdec up --detach`, `specdec down`, and commands that are typed while a system starts: real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.systems.simulated import write_tokenizer
from specdec.cli import control
from tests.support.stack import free_port
from tests.support.tiny_models import build_tiny_model
from tests.support.up_rig import ENVIRON, SPECDEC, specdec, wait_until_gone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("llama"), vocabulary_size=64, num_layers=1)


@pytest.fixture
def endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a system whose target is simulated, so it starts without torch."""
    return ["--target", "simulated:8b-0.6b", "--tokenizer", str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))]


@pytest.fixture(scope="module")
def background(simulated: list[str]) -> Iterator[tuple[subprocess.CompletedProcess[str], str]]:
    """What `up --detach` printed, and the endpoint of its system, which the last of its tests ends."""
    endpoint = f"127.0.0.1:{free_port()}"
    yield specdec("up", "--detach", *simulated, "--listen", endpoint), endpoint
    if control.is_running(int(endpoint.rpartition(":")[2])):
        specdec("down", "--endpoint", endpoint)


def pid_of(started: subprocess.CompletedProcess[str]) -> int:
    found = re.search(r"running in the background as process (\d+); ", started.stderr)
    assert found is not None, started.stderr
    return int(found[1])


def test_a_second_start_at_the_same_address_names_the_running_system_before_it_checks_models(
    background: tuple[subprocess.CompletedProcess[str], str],
) -> None:
    started, endpoint = background
    assert started.returncode == 0, started.stderr
    for flags in ([], ["--detach"]):
        refused = specdec("up", *flags, "--listen", endpoint, "--target", "/no/such/model")
        assert refused.returncode == 1
        assert refused.stderr == (
            f"error: your specdec up at {endpoint} is still running; stop it with `specdec down --endpoint {endpoint}`"
            ", or choose another address with --listen (ADDRESS_IN_USE)\n"
        )


def test_detach_returns_when_ready_and_down_ends_the_system_and_all_its_processes(
    background: tuple[subprocess.CompletedProcess[str], str],
) -> None:
    started, endpoint = background
    assert (started.returncode, started.stdout) == (0, f"ready grpc={endpoint}\n"), started.stderr
    pid = pid_of(started)
    assert f"stop it with: specdec down --endpoint {endpoint}; log: " in started.stderr
    assert "[target-0] listening" in started.stderr
    log = Path(started.stderr.rstrip().rpartition("; log: ")[2])
    assert (log.stat().st_mode & 0o777, "[target-0] listening" in log.read_text()) == (0o600, True)
    assert specdec("status", "--endpoint", endpoint).returncode == 0
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    stopped = specdec("down", "--json", "--endpoint", endpoint)
    assert (stopped.returncode, json.loads(stopped.stdout)) == (0, {"stopped": endpoint}), stopped.stderr
    assert [each for each in children if Path(f"/proc/{each}").exists()] == []
    wait_until_gone([pid])


def test_a_term_signal_to_the_process_that_detach_names_ends_the_system(simulated: list[str], endpoint: str) -> None:
    started = specdec("up", "--detach", "--json", *simulated, "--listen", endpoint)
    assert json.loads(started.stdout) == {"grpc": endpoint, "http": None, "metrics": {}}
    pid = pid_of(started)
    os.kill(pid, signal.SIGTERM)
    wait_until_gone([pid])


def test_a_background_start_that_fails_is_the_error_and_the_exit_code_of_the_start(endpoint: str) -> None:
    failed = specdec("up", "--detach", "--target", "/no/such/model", "--listen", endpoint)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert re.fullmatch(r"error: --target: .+ \([A-Z_]+\)", failed.stderr.splitlines()[-1]), failed.stderr


def test_commands_that_are_typed_right_after_up_wait_for_it_and_say_what_it_does(model: Path, endpoint: str) -> None:
    up = subprocess.Popen(
        [*SPECDEC, "up", "--target", str(model), "--listen", endpoint],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRON,
    )  # fmt: skip
    try:
        commands = {
            "status": ("status",),
            "generate": ("generate", "x", "--max-new-tokens", "2", "--json"),
        }
        waiting = {
            name: subprocess.Popen(
                [*SPECDEC, *words, "--endpoint", endpoint],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON,
            )
            for name, words in commands.items()
        }  # fmt: skip
        for name, process in waiting.items():
            stdout, stderr = process.communicate()
            assert process.returncode == 0, (name, stderr)
            assert stdout
            assert re.search(rf"waiting for specdec up at {endpoint} \(\d+ s\): .*(checking|target-0)", stderr), stderr
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait()


def test_a_command_whose_system_fails_to_start_is_told_so(tmp_path: Path, endpoint: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama9"}')
    up = subprocess.Popen(
        [*SPECDEC, "up", "--target", str(tmp_path), "--listen", endpoint],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRON,
    )  # fmt: skip
    result = specdec("status", "--endpoint", endpoint)
    assert up.wait() == 1
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].endswith("(COORDINATOR_UNAVAILABLE)")
