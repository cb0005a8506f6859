"""The measurement of one pair of models: servers started, batches by turns, texts compared.

Called by `bench.suites.peers.suite`.
"""

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any

from bench.harness.pairs import take_turns
from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.harness.workload import OwnPrompts
from bench.suites.peers.figures import (
    Batch,
    batch_rows,
    comparison_rows,
    count_matches,
    server_rows,
    text_rows,
)
from bench.systems.http_servers import MAX_STREAMS
from bench.systems.process import PeerServer, ServerFailure
from bench.systems.served import ALONE, DRAFTED, LLAMA, SPECDEC_INT8, TRANSFORMERS, ServedPair, System, make_server
from bench.systems.transformers_server import TransformersServer

NUM_STREAMS = (1, MAX_STREAMS)
NUM_BATCHES, NUM_QUICK_BATCHES = 9, 1
NUM_QUICK_TOKENS = 16

_REFERENCES = (TRANSFORMERS + ALONE, TRANSFORMERS + DRAFTED)


def answer_batch(
    run: Callable[[Coroutine[Any, Any, Any]], Any], server: PeerServer, prompts: list[list[int]], num_tokens: int
) -> Batch:
    """Have a server answer a batch, and release what the batch left in it; `run` runs a coroutine to its end."""
    before_s = server.cpu_s()
    answers = run(server.answer(prompts, num_tokens))
    batch = Batch(prompts, answers, server.cpu_s() - before_s)
    run(server.settle())
    return batch


class PairRun:
    """The measurement of one pair."""

    def __init__(self, suite: str, runner: asyncio.Runner, pair: ServedPair, arguments: argparse.Namespace) -> None:
        """Describe the measurement; the flags are those of `bench.suites.peers.suite`."""
        self._row = partial(Row, suite=suite, origin=Origin(), quick=arguments.quick)
        self._run = runner.run
        self._pair = pair
        self._peers = arguments.peers_folder
        self._quick = arguments.quick
        self._num_tokens = NUM_QUICK_TOKENS if self._quick else pair.num_tokens
        self._prompts = pair.prompts()
        self._notes = [
            pair.note,
            "Transformers drafts for one stream at a time: its drafted streams wait for each other.",
        ]
        self._batches: dict[str, list[Batch]] = {}
        """Every batch of each system, of the first group in which it ran: their texts are compared."""

    def rows(self, groups: Sequence[Sequence[System]]) -> list[Row]:
        """Measure group after group, the systems of each taking turns; return all rows of the pair."""
        rows = [row for group in groups for row in self._group_rows(group, is_only=len(groups) == 1)]
        rows += self._text_rows()
        return [replace(row, note=" ".join(dict.fromkeys(self._notes))) for row in rows]

    def _group_rows(self, group: Sequence[System], is_only: bool) -> list[Row]:
        beside = "" if is_only else f", beside {group[-1].name}"
        servers: list[PeerServer] = []
        try:
            with progress(f"{self._pair.name}{beside}: starting", len(group)) as advance:
                for system in group:
                    self._start(system, servers)
                    advance()
            rows: list[Row] = []
            done: dict[str, list[Batch]] = {server.name: [] for server in servers}
            prompts = OwnPrompts(self._prompts)
            for num_streams in NUM_STREAMS:
                batches = self._measure(servers, prompts, num_streams, beside)
                case = f"{self._pair.name}, {num_streams} stream{'s' * (num_streams > 1)}{beside}"
                make_row = partial(self._row, case=case)
                rows += comparison_rows(make_row, batches) + batch_rows(make_row, batches)
                for name, measured in batches.items():
                    done[name] += measured
            for server in servers:
                row = partial(self._row, case=f"{self._pair.name}{beside}")
                rows += server_rows(row, server.name, server.start_s, server.pss_bytes())
            self._batches = done | self._batches
            return rows
        finally:
            for server in servers:
                self._run(server.stop())

    def _start(self, system: System, servers: list[PeerServer]) -> None:
        """Start a server and have it answer once; a server that cannot is left out and noted."""
        try:
            server = make_server(system, self._pair, self._peers)
            self._run(server.start())
        except ServerFailure as failure:
            self._notes.append(f"{system.name} left out: {failure}.")
            return
        servers.append(server)

    def _measure(
        self, servers: Sequence[PeerServer], prompts: OwnPrompts, num_streams: int, beside: str
    ) -> dict[str, list[Batch]]:
        num_batches = NUM_QUICK_BATCHES if self._quick else NUM_BATCHES
        systems = {
            server.name: partial(answer_batch, self._run, server, num_tokens=self._num_tokens) for server in servers
        }
        label = f"{self._pair.name}{beside}: {num_streams} streams"
        warmup, *batches = [prompts.batch(num_streams) for _ in range(1 + num_batches)]
        return take_turns(label, systems, batches, [warmup])

    def _text_rows(self) -> list[Row]:
        """Compare every system's texts with Transformers'; the prompts of all groups are the same."""
        reference = next((name for name in _REFERENCES if name in self._batches), None)
        if reference is None:
            return []
        with ExitStack() as checkers:
            gap = partial(self._logit_gap, cache(partial(self._start_checker, checkers)))
            prompts, expected = self._texts(reference)
            rows: list[Row] = []
            for name in self._batches:
                if name != reference:
                    matches = count_matches(prompts, self._texts(name)[1], expected, gap)
                    row = partial(self._row, case=self._pair.name)
                    rounds_otherwise = (SPECDEC_INT8,) if self._pair.llama_rounds_alike else (SPECDEC_INT8, LLAMA)
                    must_match = not name.startswith(rounds_otherwise)
                    rows += text_rows(row, name, reference, matches, must_match)
            return rows

    def _start_checker(self, checkers: ExitStack) -> TransformersServer:
        """Start the server that tells ties from differences: most runs have neither."""
        checker = TransformersServer("checker", self._pair.target.checkpoint, None, self._pair.dtype)
        self._run(checker.start())
        checkers.callback(lambda: self._run(checker.stop()))
        return checker

    def _texts(self, name: str) -> tuple[list[list[int]], list[list[int]]]:
        """Return the prompts of a system and the tokens that it answered."""
        batches = self._batches[name]
        prompts = [prompt for batch in batches for prompt in batch.prompts]
        return prompts, [answer.token_ids for batch in batches for answer in batch.answers]

    def _logit_gap(
        self, checker: Callable[[], TransformersServer], token_ids: list[int], first: int, second: int
    ) -> float:
        return float(self._run(checker().logit_gap(token_ids, first, second)))
