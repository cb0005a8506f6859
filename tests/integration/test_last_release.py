"""The last release's services beside today's: an upgrade and a rollback under streams, in the documented order.

Seeds fix the texts, so a stream that two versions served differently is noticed as well as one that failed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.systems.simulated import write_tokenizer
from specdec.client import Budgets, Client
from tests.support.redis_fixture import RedisServer, redis_server
from tests.support.releases import last_release, unpack
from tests.support.services import ROOT, Services
from tests.support.stack import free_port

__all__ = ["redis_server"]

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

REPLICAS = ("target_service", "draft_service")
MODEL = "simulated:8b-0.6b"
NUM_STREAMS, NUM_TOKENS = 4, 48
#: Of a client, in seconds. No test waits for it where nothing is wrong.
PATIENCE_S = 120.0


class Streams:
    """Clients that run sessions of two turns, one after another, and compare each text with the first of its seed."""

    def __init__(self, endpoints: str) -> None:
        self._endpoints = endpoints
        self._texts: dict[tuple[int, int], tuple[int, ...]] = {}
        self._lock, self._ended, self._has_turn = threading.Lock(), threading.Event(), threading.Condition()
        self.num_turns = 0
        self.faults: list[str] = []

    @contextmanager
    def running(self) -> Iterator[Streams]:
        threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()

    def wait_for(self, num_turns: int) -> None:
        """Return once that many further turns have ended."""
        with self._has_turn:
            wanted = self.num_turns + num_turns
            assert self._has_turn.wait_for(lambda: self.num_turns >= wanted or self.faults, PATIENCE_S * 3)
        assert not self.faults

    def _run(self, seed: int) -> None:
        patient = Budgets(connect_s=PATIENCE_S, resume_s=PATIENCE_S, target_s=PATIENCE_S)
        with Client(self._endpoints, budgets=patient) as client:
            for index in itertools.count():
                session_id = f"s-{seed}-{index}"
                for turn in range(2):
                    if self._ended.is_set():
                        return
                    self._turn(client, session_id, seed, turn)
                client.delete_session(session_id)

    def _turn(self, client: Client, session_id: str, seed: int, turn: int) -> None:
        try:
            done = client.generate(
                prompt_token_ids=[seed + 1, 2, 3 + turn], session_id=session_id, seed=seed, temperature=1.0,
                max_new_tokens=NUM_TOKENS, ignore_eos=True,
            )  # fmt: skip
            first = self._texts.setdefault((seed, turn), done.token_ids)
            faults = [] if done.token_ids == first else [f"{session_id}, turn {turn}: another text"]
        except Exception as error:
            faults = [f"{session_id}, turn {turn}: {error!r}"]
        with self._has_turn:
            self.num_turns += 1
            self.faults += faults
            self._has_turn.notify_all()


def test_an_upgrade_and_its_rollback_under_streams_fail_none(tmp_path: Path, redis_server: RedisServer) -> None:
    release = last_release()
    print(f"beside {release}")
    sources = unpack(release, tmp_path / "release")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    url = redis_server.url
    endpoints = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    flags = ["--tokenizer", str(tokenizer), "--target-wait-s", "60"]
    with Services(sources, url, tmp_path) as old, Services(ROOT, url, tmp_path) as new:
        for role in REPLICAS:
            old.start(role, "--model", MODEL)
        old.start("coordinator", *flags, address=endpoints[0])
        with Streams(",".join(endpoints)).running() as streams:
            streams.wait_for(3 * NUM_STREAMS)  # both turns of every seed
            for before, after, place in ((old, new, 1), (new, old, 0)):
                for role in REPLICAS:  # replicas first, as docs/how-to/upgrade.md says
                    after.start(role, "--model", MODEL)
                streams.wait_for(NUM_STREAMS)  # both versions' replicas, one version's coordinator
                before.end(*REPLICAS)
                streams.wait_for(2 * NUM_STREAMS)
                after.start("coordinator", *flags, address=endpoints[place])
                streams.wait_for(2 * NUM_STREAMS)  # both versions' coordinators
                before.end("coordinator")
                streams.wait_for(2 * NUM_STREAMS)
        assert not streams.faults


def test_a_session_of_today_is_continued_by_the_last_releases_coordinator(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    sources = unpack(last_release(), tmp_path / "release")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    url = redis_server.url
    with Services(sources, url, tmp_path) as old, Services(ROOT, url, tmp_path) as new:
        for role in REPLICAS:
            new.start(role, "--model", MODEL)
        told = []
        for services in (new, old):
            with Client(services.start("coordinator", "--tokenizer", str(tokenizer))) as client:
                done = client.generate(
                    prompt_token_ids=[1, 2], session_id="carried", seed=1, max_new_tokens=8, ignore_eos=True
                )
                told.append((done.usage.num_prompt_tokens, done.usage.num_output_tokens))
            services.end("coordinator")
    assert told == [(2, 8), (12, 8)]
