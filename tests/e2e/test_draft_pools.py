"""`specdec up` with several draft models: each a pool that requests name, `status` shows and `scale` counts."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from bench.systems.simulated import write_tokenizer
from specdec.client import Client
from specdec.contract.errors import SpecdecError
from tests.support.up_rig import specdec, start_up

PAIR = "simulated:8b-0.6b"


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    drafts = [f"a-odd={PAIR},alpha=0.2,odd_alpha=0.95", f"b-even={PAIR},alpha=0.95,odd_alpha=0.2"]
    flags = [word for draft in drafts for word in ("--draft", draft)]
    up, endpoint = start_up("--target", PAIR, *flags, "--tokenizer", str(tokenizer), "--route", "auto")
    yield endpoint
    up.send_signal(signal.SIGTERM)
    up.communicate()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    drafts = ("--draft", f"good={PAIR},alpha=1.0", "--draft", f"{PAIR},alpha=0.0", "--draft", "suffix")
    up, endpoint = start_up("--target", PAIR, *drafts, "--tokenizer", str(tokenizer))
    yield endpoint
    up.send_signal(signal.SIGTERM)
    up.communicate()


def accepted(endpoint: str, draft_pool: str) -> tuple[int, set[str]]:
    """Accepted draft tokens of a greedy request, and the pools they came from."""
    with Client(endpoint) as client:
        result = client.generate(
            prompt_token_ids=[5, 6, 7], max_new_tokens=24, temperature=0.0, ignore_eos=True, gamma=4, seed=3,
            draft_pool=draft_pool, provenance=True, stream=False,
        )  # fmt: skip
    pools = {detail.draft_pool for detail in result.details if detail.source.name == "ACCEPTED"}
    return result.stats.num_accepted_tokens, pools


def test_each_model_is_a_pool_and_a_request_is_drafted_by_the_one_it_names(endpoint: str) -> None:
    assert accepted(endpoint, "good") == (19, {"good"})
    num_accepted, pools = accepted(endpoint, "8b-0.6b-alpha-0.0")
    assert (num_accepted, pools) == (0, set())


def test_a_request_that_names_no_pool_gets_the_model_that_was_given_first(endpoint: str) -> None:
    num_accepted, pools = accepted(endpoint, "")
    assert num_accepted > 12
    assert pools - {"suffix"} == {"good"}


def test_an_unknown_pool_is_refused_and_told_which_there_are(endpoint: str) -> None:
    with pytest.raises(SpecdecError, match=r"there are 8b-0.6b-alpha-0.0, good, suffix") as caught:
        accepted(endpoint, "better")
    assert caught.value.reason == "POOL_NOT_FOUND"


def test_status_shows_every_pool_and_scale_counts_each_of_them(endpoint: str) -> None:
    assert replicas(endpoint) == {"8b-0.6b-alpha-0.0": 1, "good": 1, "suffix": 0}
    scaled = specdec("scale", "draft-good=2", "--endpoint", endpoint)
    assert (scaled.returncode, scaled.stdout) == (0, "target=1 draft-good=2 draft-8b-0.6b-alpha-0.0=1\n"), scaled.stderr
    assert replicas(endpoint)["good"] == 2
    refused = specdec("scale", "draft=2", "--endpoint", endpoint)
    assert refused.returncode == 1
    assert "it has target, draft-good, draft-8b-0.6b-alpha-0.0" in refused.stderr


@pytest.mark.full
def test_each_kind_of_requests_gets_the_pool_that_is_good_at_it_and_pools_shows_it(routed: str) -> None:
    """Even and odd seeds are two kinds of texts, and each pool is good at one; before, it drafted for neither."""
    kinds = {"sql": 0, "tests": 1}
    with Client(routed) as client:
        for index in range(12):
            for task, parity in kinds.items():
                result = client.generate(
                    prompt_token_ids=[5, 6, 7], max_new_tokens=64, temperature=0.0, ignore_eos=True, gamma=None,
                    seed=2 * index + parity, task=task, provenance=True,
                )  # fmt: skip
                client.delete_session(result.session_id)
        routes = [
            (pool["name"], route)
            for pool in json.loads(specdec("pools", "--json", "--endpoint", routed).stdout)["pools"]
            for route in pool["routes"]
        ]
        chosen = {route["request_class"]: (name, route) for name, route in routes if route["is_chosen"]}
    assert {name: pool for name, (pool, _) in chosen.items()} == {
        "sql/rejection/greedy": "b-even",
        "tests/rejection/greedy": "a-odd",
    }
    for request_class, (_, route) in chosen.items():
        assert route["alpha"] == pytest.approx(0.95, abs=0.05)
        # By how much depends on how long a round takes on a loaded machine, not only on what is accepted.
        assert route["weight"] == max(other["weight"] for _, other in routes if other["request_class"] == request_class)
    shown = specdec("pools", "--endpoint", routed).stdout
    assert shown.count("chosen") == 2


def test_a_long_text_leaves_in_mid_stream_the_pool_that_it_began_with_and_is_bad_at_it(routed: str) -> None:
    with Client(routed) as client:
        result = client.generate(
            prompt_token_ids=[5, 6, 7], max_new_tokens=400, temperature=0.0, ignore_eos=True, gamma=None, seed=8,
            task="never seen before", provenance=True,
        )  # fmt: skip
        alone = client.generate(
            prompt_token_ids=[5, 6, 7], max_new_tokens=400, temperature=0.0, ignore_eos=True, seed=8, mode="off",
        )  # fmt: skip
    assert result.token_ids == alone.token_ids
    pools = [detail.draft_pool for detail in result.details]
    first = pools.index("b-even")
    assert 0 < first < 150
    assert set(pools[first:]) <= {"b-even", ""}


def test_promote_prints_its_state_and_refuses_an_unknown_pool(routed: str) -> None:
    promoted = specdec("promote", "b-even", "--to", "0.05", "--endpoint", routed)
    assert promoted.stdout == "b-even: 1% of the sessions, to reach 5%, in progress\n", promoted.stderr
    assert specdec("pools", "--endpoint", routed).stdout.startswith("b-even: 1% of the sessions")
    assert specdec("promote", "b-even", "--to", "0", "--endpoint", routed).stdout == "nothing is promoted\n"
    for wrong, words in (("better", "is not a draft pool; there are"), ("suffix", "is not a draft pool; there are")):
        refused = specdec("promote", wrong, "--endpoint", routed)
        assert refused.returncode == 1
        assert words in refused.stderr
    assert "share must be 0 to 1" in specdec("promote", "b-even", "--to", "1.5", "--endpoint", routed).stderr


def replicas(endpoint: str) -> dict[str, int]:
    shown = json.loads(specdec("status", "--json", "--endpoint", endpoint).stdout)
    return {pool["name"]: len(pool["replicas"]) for pool in shown["pools"] if pool["role"] == "draft"}


@pytest.mark.parametrize(
    ("drafts", "words"),
    [
        (("a=x", "a=y"), "two draft models are called a"),
        (("suffix=x",), "a draft model cannot be called suffix"),
    ],
)
def test_names_that_cannot_be_are_one_line(drafts: tuple[str, ...], words: str) -> None:
    refused = specdec("up", *(word for draft in drafts for word in ("--draft", draft)))
    assert refused.returncode == 2
    assert words in refused.stderr
