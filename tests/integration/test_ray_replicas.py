"""Replicas on a Ray cluster of three nodes: placed, scaled, and lost with their node, under load. Simulated engines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.harness.steady_load import SteadyLoad
from bench.systems.ray_nodes import NUM_CPUS, RayNodes, descendants
from bench.systems.simulated import write_tokenizer
from specdec.client import Budgets, Client
from tests.support.redis_fixture import RedisServer
from tests.support.tiny_models import build_tiny_model
from tests.support.up_rig import specdec, start_up, wait_until_gone

pytest.importorskip("ray")

PAIR = "simulated:8b-0.6b"
ASK = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def place(nodes: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Flags of `specdec up`: the cluster, and a Redis that it reaches."""
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    redis.start()
    yield ["--ray-address", nodes.address, "--redis-url", redis.url, "--device", "cpu", "--insecure"]
    redis.stop()


@pytest.fixture(scope="module")
def system(
    nodes: RayNodes, place: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `specdec up` of a simulated pair and its endpoint; its end is a test's."""
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    pair = ["--target", PAIR, "--draft", PAIR, "--tokenizer", str(tokenizer)]
    up, endpoint = start_up(*place, *pair, **nodes.environ)
    yield up, endpoint
    up.kill()
    up.communicate()


def services(nodes: RayNodes, module: str) -> list[int]:
    """Processes of a service, on whichever node."""
    found = []
    for pid in {pid for raylet in nodes.raylets for pid in descendants(raylet)}:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if module.encode() in words:
            found.append(pid)
    return sorted(found)


def alive(endpoint: str, role: str) -> int:
    with Client(endpoint) as client:
        return sum(len(pool.replicas) for pool in client.info().pools if pool.role == role)


def scale(endpoint: str, *counts: str) -> None:
    scaled = specdec("scale", *counts, "--endpoint", endpoint)
    assert (scaled.returncode, scaled.stdout) == (0, " ".join(counts) + "\n"), scaled.stderr


def wait_until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.05)


def wait_for_all_streams(load: SteadyLoad) -> None:
    """Each of them ends another output."""
    before = list(load.outputs_ended)
    wait_until(lambda: bool(load.faults) or all(now > was for now, was in zip(load.outputs_ended, before, strict=True)))


@pytest.mark.full
def test_a_pair_that_is_added_is_on_another_node_and_the_first_leaves_without_a_lost_token(
    nodes: RayNodes, system: tuple[subprocess.Popen[str], str]
) -> None:
    _, endpoint = system
    (first,) = services(nodes, "target_service")
    with SteadyLoad(endpoint, num_streams=4) as load:
        scale(endpoint, "target=2", "draft=2")
        targets = services(nodes, "target_service")
        assert {nodes.node_of(pid) for pid in targets} == {0, 1}
        # Both nodes have it, and have given some of it.
        refused = last_line(placing(nodes, "--cpus", "4", "--place-timeout-s", "2"))
        wait_for_all_streams(load)
        scale(endpoint, "target=1", "draft=1")
        assert len(services(nodes, "target_service")) == 1
        assert first not in services(nodes, "target_service")
        wait_for_all_streams(load)
    assert load.faults == []
    words = r"target-7 needs 4 CPU, the Ray cluster has 8 CPU of which \d are free"
    assert re.fullmatch(rf"error: {words} \(QUOTA_EXCEEDED\)", refused)
    wait_until(lambda: nodes.free_cpus() == NUM_CPUS * len(nodes.raylets) - 2)


def test_more_than_any_node_has_is_one_line_at_once_and_takes_nothing(nodes: RayNodes) -> None:
    free = nodes.free_cpus()
    refused = placing(nodes, "--cpus", "9")
    assert last_line(refused) == (
        "error: target-7 needs 9 CPU, the largest node of the Ray cluster has 4 CPU (QUOTA_EXCEEDED)"
    )
    assert nodes.free_cpus() == free


def placing(nodes: RayNodes, *flags: str) -> subprocess.Popen[str]:
    """The process that places one more target."""
    command = [sys.executable, "-m", "specdec.service.ray.placed_replica", "--ray-address", nodes.address]
    command += ["--name", "target-7", "--role", "target", *flags, "--", "--model", PAIR]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | nodes.environ)


def last_line(process: subprocess.Popen[str]) -> str:
    """Of one that fails."""
    output, _ = process.communicate()
    assert process.returncode == 1, output
    return output.splitlines()[-1]


def test_a_node_that_is_lost_under_load_costs_no_token_and_its_replicas_come_back_on_another(
    nodes: RayNodes, system: tuple[subprocess.Popen[str], str]
) -> None:
    _, endpoint = system
    (target,) = services(nodes, "target_service")
    with SteadyLoad(endpoint, num_streams=4) as load:
        nodes.kill(nodes.node_of(target))
        wait_for_all_streams(load)
        wait_until(lambda: len(services(nodes, "target_service")) == len(services(nodes, "draft_service")) == 1)
        wait_until(lambda: alive(endpoint, "target") == alive(endpoint, "draft") == 1)
        wait_for_all_streams(load)
    assert load.faults == []


def test_the_end_of_up_is_the_end_of_its_actors_and_services(
    nodes: RayNodes, system: tuple[subprocess.Popen[str], str]
) -> None:
    up, _ = system
    running = [*descendants(up.pid), *services(nodes, "target_service"), *services(nodes, "draft_service")]
    assert len(running) >= 5
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) == 0
    wait_until_gone(running)
    wait_until(lambda: nodes.free_cpus() == NUM_CPUS * len(nodes.raylets))


@pytest.mark.full
def test_a_rank_that_is_killed_costs_no_token_and_the_end_of_up_by_force_leaves_nothing(
    nodes: RayNodes, place: list[str], tmp_path: Path
) -> None:
    model = str(build_tiny_model("llama", tmp_path))
    divided = ["--target", model, "--tensor-parallel", "2", "--self-check", "off"]
    up, endpoint = start_up(*place, *divided, **nodes.environ)
    with Client(endpoint, budgets=Budgets(resume_s=240)) as client:
        expected = client.generate(prompt_token_ids=[5, 6, 7], stream=False, **ASK).token_ids
        with client.generate(prompt_token_ids=[5, 6, 7], stream=True, **ASK) as stream:
            token_ids = list(next(stream).token_ids)
            first, second = services(nodes, "specdec.service.rank")
            assert nodes.node_of(first) == nodes.node_of(second)
            os.kill(second, signal.SIGKILL)
            for chunk in stream:
                token_ids += chunk.token_ids
    assert token_ids == list(expected)
    ranks = services(nodes, "specdec.service.rank")
    assert len({first, second, *ranks}) == 4
    running = [*descendants(up.pid), *ranks]
    up.kill()
    up.communicate()
    wait_until_gone(running)
    wait_until(lambda: nodes.free_cpus() == NUM_CPUS * len(nodes.raylets))
