"""A promoted draft that makes fewer tokens a second is rolled back, in a running `specdec up` that it joined."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from specdec.client import Client
from tests.support.tiny_models import build_tiny_model
from tests.support.up_rig import specdec, start_up


def session_ids(pool: str, least: float, most: float) -> Iterator[str]:
    """Of sessions that a promotion gives its pool from a share between these on."""
    for number in count():
        session_id = f"from-{least}-{number}"
        drawn = int.from_bytes(hashlib.blake2b(f"{pool}\0{session_id}".encode(), digest_size=8).digest())
        if least <= drawn / 2.0**64 < most:
            yield session_id


@pytest.mark.full
def test_a_draft_that_joined_and_makes_fewer_tokens_a_second_is_taken_back_by_itself(tmp_path: Path) -> None:
    """All that the old draft says is accepted, of the new one's next to nothing; a round takes as long with either."""
    target = build_tiny_model("llama", tmp_path / "target", vocabulary_size=64, num_layers=2)
    worse = build_tiny_model("llama", tmp_path / "worse", vocabulary_size=64, num_layers=2, seed=99)
    up, endpoint = start_up("--target", str(target), "--draft", f"old={target}", "--route", "auto")
    try:
        joined = specdec("join", f"worse={worse}", "--endpoint", endpoint)
        assert joined.returncode == 0, joined.stderr
        assert specdec("promote", "worse", "--endpoint", endpoint).returncode == 0
        with_it, without_it = session_ids("worse", 0.0, 0.01), session_ids("worse", 0.5, 1.0)
        with Client(endpoint) as client:

            def pools_of(session_id: str) -> set[str]:
                done = client.generate(prompt_token_ids=[5, 9, 17], session_id=session_id, max_new_tokens=96, gamma=8,
                                       temperature=0.0, ignore_eos=True, task="y", provenance=True)  # fmt: skip
                return {detail.draft_pool for detail in done.details if detail.draft_pool}

            num_asked = 0
            while (promotion := client.info().promotion) is None or promotion.status == "running":
                pools_of(next(with_it))
                pools_of(next(without_it))
                num_asked += 1
            assert (promotion.status, promotion.draft_pool) == ("rolled_back", "worse")
            assert num_asked >= 16
            assert "old" in set.union(*(pools_of(next(with_it)) for _ in range(4)))
    finally:
        up.send_signal(signal.SIGTERM)
        up.communicate()
