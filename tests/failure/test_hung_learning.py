"""Stopped parts of the learning loop: `specdec distill`, a shadow, a starting draft, `specdec up` itself.

Streams continue with the same text, and everything works as before afterwards. The parts are real processes of one
`specdec up`, stopped and continued by signals. `tests/e2e/test_learning` tests the loop without faults.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdec.cli import control
from specdec.cli.__main__ import run
from specdec.client import Client
from tests.support.freezing import frozen
from tests.support.target_alone import TargetAlone
from tests.support.tiny_models import build_tiny_pair
from tests.support.up_rig import ENVIRON, SPECDEC, children_of, specdec, start_up

pytestmark = pytest.mark.full

NUM_TOKENS = 64
PROMPT = [5, 9, 17]


@dataclass
class System:
    up: subprocess.Popen[str]
    endpoint: str
    folder: Path
    expected: list[int]
    """Output of the target alone for PROMPT."""

    def serve(self, count: int = 1, **options: object) -> list[set[str]]:
        """Make greedy requests and check their output; return the pools of their accepted tokens."""
        pools = []
        with Client(self.endpoint) as client:
            for _ in range(count):
                asked = {"max_new_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "task": "x", **options}
                done = client.generate(prompt_token_ids=PROMPT, provenance=True, **asked)
                assert list(done.token_ids) == self.expected
                client.delete_session(done.session_id)
                pools.append({detail.draft_pool for detail in done.details if detail.draft_pool})
        return pools

    def log(self, count: int, first_seed: int) -> None:
        """Make requests at T = 1, from which a draft can learn."""
        with Client(self.endpoint) as client:
            for seed in range(first_seed, first_seed + count):
                client.generate(prompt_token_ids=[5 + seed % 50, 9, 17], max_new_tokens=NUM_TOKENS, temperature=1.0,
                                seed=seed, ignore_eos=True, task="x")  # fmt: skip

    def tested(self, pool: str) -> float:
        """Return the number of draft tokens that the pool's score is based on; -1 where the pool is not connected."""
        told = json.loads(specdec("pools", "--json", "--endpoint", self.endpoint).stdout)["pools"]
        pools = [each for each in told if each["name"] == pool and each["replicas"]]
        return sum(route["num_tested"] for each in pools for route in each["routes"]) if pools else -1.0

    def process_of(self, pool: str) -> int:
        """Return the process of the only draft replica of a pool, after it has started."""
        while True:
            for pid in children_of(self.up):
                with contextlib.suppress(OSError):
                    if pool in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                        return pid
            time.sleep(0.05)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("loop")
    build_tiny_pair("llama", folder, vocabulary_size=64, num_layers=2, perturb=0.3)
    models = ("--target", str(folder / "target"), "--draft", f"old={folder / 'draft'}")
    up, endpoint = start_up(*models, "--route", "auto", "--dtype", "float32", "--learning-log", str(folder / "log"))
    expected = TargetAlone(folder / "target").greedy(PROMPT, NUM_TOKENS)
    yield System(up, endpoint, folder, expected)
    up.send_signal(signal.SIGTERM)
    up.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    """The test's own time limit is the bound."""
    while not condition():
        time.sleep(0.05)


def test_a_stopped_distillation_does_not_affect_serving_and_continues_with_the_remaining_log(
    system: System,
) -> None:
    segments = system.folder / "log" / "tenant-default"
    system.log(16, 0)
    wait_until(lambda: bool(list(segments.glob("*.safetensors"))))
    made = system.folder / "new"
    command = [*SPECDEC, "distill", "--log", str(system.folder / "log"), "--draft", str(system.folder / "draft"),
               "--out", str(made), "--max-steps", "60", "--share", "0.15", "--learning-rate", "2e-3"]  # fmt: skip
    with subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as distilling:  # fmt: skip
        assert distilling.stderr is not None
        while not (training := re.search(r"step (\d+)", line := distilling.stderr.readline())):
            assert line, "it has ended"
        with frozen(distilling.pid):
            system.log(4, 100)
            for path in segments.glob("*.safetensors"):
                path.unlink()  # as retention does
            system.log(4, 200)
            assert system.serve(2)
        said, complaint = distilling.communicate()
    assert distilling.returncode == 0, complaint
    assert said.startswith(f"{made}: KL ")
    # Held-out text may end it before its last step.
    assert int(training[1]) < json.loads((made / "distilled.json").read_text())["num_steps"] <= 60


def test_a_stopped_shadow_affects_no_stream_and_is_scored_again_when_it_continues(system: System) -> None:
    joined = specdec("join", f"shade={system.folder / 'target'}", "--endpoint", system.endpoint)
    assert joined.returncode == 0, joined.stderr
    wait_until(lambda: system.serve() is not None and system.tested("shade") > 0)
    with frozen(system.process_of("shade")):
        assert system.serve(3)[-1] <= {"old"}
        # Requests that get it by name or by promotion have another draft, or none.
        system.serve(2, draft_pool="shade")
        with Client(system.endpoint) as client:
            client.promote("shade", 1.0)
        system.serve(6)
        wait_until(lambda: system.tested("shade") < 0)  # it describes itself no more
        assert system.serve(2)[-1] <= {"old"}
        with Client(system.endpoint) as client:
            client.promote("shade", 0.0)
    wait_until(lambda: system.tested("shade") >= 0)
    before = system.tested("shade")
    wait_until(lambda: system.serve() is not None and system.tested("shade") > before)
    wait_until(lambda: system.serve(draft_pool="shade")[0] == {"shade"})


def test_a_draft_that_stops_while_it_starts_blocks_nothing_and_can_be_given_up(
    system: System,
) -> None:
    command = [*SPECDEC, "join", f"stuck={system.folder / 'draft'}", "--endpoint", system.endpoint]
    with subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as joining:
        os.kill(system.process_of("stuck"), signal.SIGSTOP)
        assert system.serve(2)
        given_up = specdec("scale", "draft-stuck=0", "--endpoint", system.endpoint)
        assert given_up.returncode == 0, given_up.stderr
        _, complaint = joining.communicate()
        assert joining.returncode == 1
        assert "error: a later request asked for other numbers of replicas (STALE_EPOCH)" in complaint
    again = specdec("join", f"stuck={system.folder / 'draft'}", "--endpoint", system.endpoint)
    assert again.returncode == 0, again.stderr
    assert system.serve(1)


def test_a_stopped_specdec_up_is_reported_to_callers_and_ignores_their_requests_later(
    system: System, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "_SILENCE_TIMEOUT_S", 1.0)
    with frozen(system.up.pid):
        for asked in (["scale", "draft=2"], ["scale", "draft=0"]):
            assert run([*asked, "--endpoint", system.endpoint], {}) == 1
            last = capsys.readouterr().err.splitlines()[-1]
            assert last.startswith("error: the specdec up of port "), last
            assert last.endswith("(COORDINATOR_UNAVAILABLE)"), last
    monkeypatch.undo()
    assert system.serve(2)
    told = specdec("scale", "target=1", "--endpoint", system.endpoint)
    assert told.stdout.startswith("target=1 draft=1 "), told
