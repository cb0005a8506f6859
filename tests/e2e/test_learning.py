"""The whole loop as a user runs it: serve and log, distill beside it, join as a shadow, be scored, be promoted."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.cli.__main__ import run
from specdec.client import Client
from specdec.learning.log_files import read_segment
from tests.support.tiny_models import build_tiny_pair
from tests.support.up_rig import ENVIRON, SPECDEC, specdec, start_up

NUM_TOKENS = 64

#: Number of logged turns to learn from. A segment is written by its age, so on a slow machine the first holds fewer.
NUM_TURNS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop")
    build_tiny_pair("llama", folder, vocabulary_size=64, num_layers=2, perturb=0.3)
    return folder


@pytest.fixture(scope="module")
def endpoint(folder: Path) -> Iterator[str]:
    models = ("--target", str(folder / "target"), "--draft", f"old={folder / 'draft'}")
    up, endpoint = start_up(*models, "--route", "auto", "--learning-log", str(folder / "log"))
    yield endpoint
    up.send_signal(signal.SIGTERM)
    up.communicate()


def serve(endpoint: str, first: int, count: int) -> set[str]:
    """Requests at T = 1; the pools that had accepted tokens."""
    pools = set()
    with Client(endpoint) as client:
        for seed in range(first, first + count):
            prompt = [5 + seed % 50, 9, 17]
            done = client.generate(prompt_token_ids=prompt, max_new_tokens=NUM_TOKENS, temperature=1.0, seed=seed,
                                   ignore_eos=True, task="x", provenance=True)  # fmt: skip
            pools |= {detail.draft_pool for detail in done.details if detail.draft_pool}
    return pools


def fill_log(endpoint: str, folder: Path) -> None:
    """Serve until enough turns are written to the log."""
    serve(endpoint, 0, NUM_TURNS)
    segments = folder / "log" / "tenant-default"
    while sum(len(read_segment(path)[1]) for path in segments.glob("*.safetensors")) < NUM_TURNS:
        serve(endpoint, 100, 1)


@pytest.mark.full  # distilling such drafts and loading them is in tests/integration/test_distilled_local_drafts.py
def test_an_in_target_draft_is_distilled_and_loaded_at_the_next_start(endpoint: str, folder: Path) -> None:
    fill_log(endpoint, folder)
    made, target = folder / "exit", str(folder / "target")
    distilled = specdec("distill", "--log", str(folder / "log"), "--draft", "early-exit:1", "--target-model", target,
                        "--out", str(made), "--max-steps", "5", "--share", "1", "--learning-rate", "2e-3",
                        "--json")  # fmt: skip
    assert distilled.returncode == 0, distilled.stderr
    told = json.loads(distilled.stdout)
    assert (told["out"], told["pool"], told["num_steps"]) == (str(made), None, 5)
    assert told["after"]["kl_nats"] < told["before"]["kl_nats"]
    up, other = start_up("--target", target, "--draft", f"early-exit:1:{made}")
    with Client(other) as client:
        assert client.generate(prompt_token_ids=[5, 9, 17], max_new_tokens=8).stats.num_draft_tokens
    up.send_signal(signal.SIGTERM)
    up.communicate()


def test_a_draft_is_distilled_joins_as_a_shadow_and_is_promoted_on_its_score(endpoint: str, folder: Path) -> None:
    fill_log(endpoint, folder)
    made = folder / "new"
    distilled = specdec("distill", "--log", str(folder / "log"), "--draft", str(folder / "draft"), "--out", str(made),
                        "--max-steps", "40", "--share", "1", "--learning-rate", "2e-3", "--join", "a-new",
                        "--endpoint", endpoint)  # fmt: skip
    assert distilled.returncode == 0, distilled.stderr
    told, joined = distilled.stdout.splitlines()
    assert re.fullmatch(rf"{made}: KL \d.\d+ -> \d.\d+ nats, expected acceptance .*", told)
    assert joined.startswith("a-new joined as a shadow; ")
    assert 0 < json.loads((made / "distilled.json").read_text())["num_steps"] <= 40  # held-out text may end it early

    assert serve(endpoint, 200, 12) == {"old"}
    with subprocess.Popen([*SPECDEC, "promote", "a-new", "--on-score", "--endpoint", endpoint], env=ENVIRON,
                          stdout=subprocess.PIPE, text=True) as promoting:  # fmt: skip
        while promoting.poll() is None:
            serve(endpoint, 300, 2)
        assert promoting.stdout is not None
        said = promoting.stdout.read()
    assert (promoting.returncode, said) == (0, "a-new: 1% of the sessions, to reach 100%, in progress\n")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("old={folder}/draft", "there is already a draft pool called old"),
        ("suffix={folder}/draft", "a draft model cannot be called 'suffix'"),
        ("other={folder}/none", "is not a directory on this machine"),
    ],
)
def test_a_draft_that_cannot_join_is_one_line(
    endpoint: str, folder: Path, given: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["join", given.format(folder=folder), "--endpoint", endpoint], {}) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.endswith("(INVALID_REQUEST)")
    assert words in last
