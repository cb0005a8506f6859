"""`specdec scale`: replicas added to a running system under load, and taken away again. Simulated engines."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.steady_load import SteadyLoad
from bench.systems.simulated import write_tokenizer
from specdec.client import Client
from tests.support.up_rig import children_of, specdec, start_up

PAIR = "simulated:8b-0.6b"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], str]]:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    up, endpoint = start_up("--target", PAIR, "--draft", PAIR, "--tokenizer", str(tokenizer))
    yield up, endpoint
    up.send_signal(signal.SIGTERM)
    up.communicate()


def replicas(endpoint: str) -> dict[str, dict[str, int]]:
    """Return, by role, the replicas' ids and the number of sessions that each holds."""
    with Client(endpoint) as client:
        return {
            pool.role: {replica.replica_id: replica.num_sessions for replica in pool.replicas}
            for pool in client.info().pools
        }


def test_a_second_pair_takes_sessions_and_the_first_one_leaves_without_a_lost_token(
    system: tuple[subprocess.Popen[str], str],
) -> None:
    up, endpoint = system
    first = replicas(endpoint)
    with SteadyLoad(endpoint) as load:
        scaled = specdec("scale", "draft=2", "target=2", "--endpoint", endpoint)
        assert (scaled.returncode, scaled.stdout) == (0, "target=2 draft=2\n"), scaled.stderr
        while not all(len(ids) == 2 and all(ids.values()) for ids in replicas(endpoint).values()):
            time.sleep(0.05)
        second = {role: ids.keys() - first[role].keys() for role, ids in replicas(endpoint).items()}
        scaled = specdec("scale", "target=1", "draft=1", "--endpoint", endpoint)
        assert (scaled.returncode, scaled.stdout) == (0, "target=1 draft=1\n"), scaled.stderr
        assert {role: set(ids) for role, ids in replicas(endpoint).items()} == second
        ended = list(load.outputs_ended)
        while any(now <= before for now, before in zip(load.outputs_ended, ended, strict=True)) and not load.faults:
            time.sleep(0.05)
    assert load.faults == []
    assert len(children_of(up)) == 3


@pytest.mark.parametrize(
    ("count", "words"),
    [
        ("target=0", "target=0: the number must be 1 to 256"),
        ("draft=-1", "must be 0 to 256"),
        ("draft=9999", "must be 0 to 256"),
    ],
)
def test_a_number_that_cannot_be_is_one_line_and_changes_nothing(
    system: tuple[subprocess.Popen[str], str], count: str, words: str
) -> None:
    up, endpoint = system
    children = children_of(up)
    refused = specdec("scale", count, "--endpoint", endpoint)
    assert (refused.returncode, refused.stdout) == (1, "")
    (line,) = refused.stderr.splitlines()
    assert line.endswith("(INVALID_REQUEST)")
    assert words in line
    assert children_of(up) == children


def test_a_system_on_one_machine_never_loads_ray(system: tuple[subprocess.Popen[str], str]) -> None:
    up, _ = system
    assert "_raylet" not in Path(f"/proc/{up.pid}/maps").read_text()
