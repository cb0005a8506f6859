"""`specdec up --ray-address local`: a Ray of its own, which comes and goes with the system."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from bench.systems.ray_nodes import descendants
from bench.systems.simulated import write_tokenizer
from specdec.client import Client
from tests.support.up_rig import complaints, start_up, wait_until_gone

pytest.importorskip("ray")

PAIR = "simulated:8b-0.6b"
RAY_LINES = (
    "[ray] listening",
    "] connecting to Ray at ",
    "] asking Ray for 1 CPU",
    "] placed on node ",
    "] plaintext port: ",
)


@pytest.mark.full
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_system_on_a_ray_of_its_own_leaves_nothing_of_it(end: signal.Signals, tmp_path: Path) -> None:
    """Nor a token in the user's home, nor a word of Ray's in what `up` says."""
    before = {*Path("/tmp").glob("specdec-ray-*"), *Path.home().glob(".ray")}
    pair = ["--target", PAIR, "--draft", PAIR, "--tokenizer", str(write_tokenizer(tmp_path))]
    up, endpoint = start_up(*pair, "--ray-address", "local", "--device", "cpu")
    running = descendants(up.pid)
    with Client(endpoint) as client:
        ask = {"ignore_eos": True, "temperature": 0, "max_new_tokens": 20}
        completion = client.generate(prompt_token_ids=[5, 6, 7], **ask)
    assert (len(completion.token_ids), completion.stats.num_draft_tokens > 0) == (20, True)
    up.send_signal(end)
    _, stderr = up.communicate()
    wait_until_gone(running)
    said = [line for line in complaints(stderr).splitlines() if not any(words in line for words in RAY_LINES)]
    assert said == []
    if end == signal.SIGTERM:
        assert {*Path("/tmp").glob("specdec-ray-*"), *Path.home().glob(".ray")} == before
