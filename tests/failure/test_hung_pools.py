"""One of two draft pools is stopped under `--route auto`, in use or only scored: requests continue with the other one.

When it continues, everything works as before. The tests count rounds and choices instead of seconds."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.systems.simulated import write_tokenizer
from specdec.client import Client
from tests.support.freezing import frozen
from tests.support.up_rig import children_of, specdec, start_up

PAIR = "simulated:8b-0.6b,predraft=off"
NUM_TOKENS = 64
REQUEST_CLASS = "even/rejection/greedy"


@dataclass
class System:
    """A running `specdec up` with a pool for odd seeds and one for even ones."""

    up: subprocess.Popen[str]
    endpoint: str

    def ask(self, seed: int) -> tuple[list[int], Any, set[str]]:
        """Return the tokens, counters and pools of a request, and delete its session."""
        with Client(self.endpoint) as client:
            result = client.generate(
                prompt_token_ids=[5, 6, 7], max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, gamma=None,
                seed=seed, task="even", provenance=True,
            )  # fmt: skip
            client.delete_session(result.session_id)
        return result.token_ids, result.stats, {detail.draft_pool for detail in result.details if detail.draft_pool}

    def process_of(self, pool: str) -> int:
        """Return the process of the only draft replica of a pool."""
        for pid in children_of(self.up):
            if ("--pool", pool) in itertools.pairwise(Path(f"/proc/{pid}/cmdline").read_text().split("\0")):
                return pid
        raise AssertionError(f"no process of pool {pool}")

    def route_of(self, pool: str) -> dict[str, Any]:
        """Return the statistics of a pool for these requests; {} where it is not connected."""
        told = json.loads(specdec("pools", "--json", "--endpoint", self.endpoint).stdout)["pools"]
        routes = [route for each in told if each["name"] == pool and each["replicas"] for route in each["routes"]]
        return next((route for route in routes if route["request_class"] == REQUEST_CLASS), {})


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    drafts = (f"a-odd={PAIR},alpha=0.2,odd_alpha=0.95", f"b-even={PAIR},alpha=0.95,odd_alpha=0.2")
    flags = [word for draft in drafts for word in ("--draft", draft)]
    up, endpoint = start_up("--target", PAIR, *flags, "--tokenizer", str(tokenizer), "--route", "auto")
    running = System(up, endpoint)
    wait_until(lambda: running.ask(0)[2] == {"b-even"})
    yield running
    up.send_signal(signal.SIGTERM)
    up.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    """The test's own time limit is the bound."""
    while not condition():
        time.sleep(0.05)


def test_while_the_chosen_pool_is_stopped_the_other_drafts_and_then_it_is_chosen_again(system: System) -> None:
    before = [system.ask(seed) for seed in (2, 4, 6)]
    assert all(pools == {"b-even"} for _, _, pools in before)
    with frozen(system.process_of("b-even")):
        during = [system.ask(seed) for seed in (2, 4, 6)]
        assert [tokens for tokens, _, _ in during] == [tokens for tokens, _, _ in before]
        assert during[-1][2] <= {"a-odd"}  # whose poor drafts may be worth less than none
        wait_until(lambda: not system.route_of("b-even"))  # it describes itself no more
        system.ask(8)
    wait_until(lambda: system.ask(2)[2] == {"b-even"})
    after = [system.ask(seed) for seed in (2, 4, 6)]
    assert [tokens for tokens, _, _ in after] == [tokens for tokens, _, _ in before]
    assert all(pools == {"b-even"} for _, _, pools in after)
    rounds = [sum(stats.num_rounds for _, stats, _ in outcomes) for outcomes in (before, after)]
    assert rounds[1] <= 1.3 * rounds[0], rounds
    assert system.route_of("b-even")["is_chosen"]


def test_a_stopped_pool_that_is_only_scored_costs_no_round_and_is_scored_again_later(system: System) -> None:
    before = [system.ask(seed) for seed in (2, 4, 6)]
    with frozen(system.process_of("a-odd")):
        during = [system.ask(seed) for seed in (2, 4, 6)]
        wait_until(lambda: not system.route_of("a-odd"))
        during += [system.ask(seed) for seed in (2, 4, 6)]
    for outcome in during:
        tokens, stats, pools = before[during.index(outcome) % 3]
        assert outcome[0] == tokens
        assert outcome[2] == pools == {"b-even"}
        assert outcome[1].num_target_only_steps <= stats.num_target_only_steps + 2
    wait_until(lambda: bool(system.route_of("a-odd")))
    alpha = system.route_of("a-odd")["alpha"]

    def is_scored_again() -> bool:
        system.ask(2)
        return bool(system.route_of("a-odd")["alpha"] != alpha)

    wait_until(is_scored_again)
    assert system.route_of("b-even")["is_chosen"]
