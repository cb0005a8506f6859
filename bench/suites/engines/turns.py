"""Servers that answer the same batches by turns. Called by the parts of the suite `engines`."""

from collections.abc import Mapping, Sequence
from functools import partial

from bench.harness.pairs import MIN_PAIRS, take_turns
from bench.harness.report import progress
from bench.harness.workload import OwnPrompts
from bench.suites.peers.figures import Batch
from bench.suites.peers.pair_run import answer_batch
from bench.systems.process import PeerServer, Run

NUM_QUICK_TOKENS = 16


def start_all(run: Run, servers: Sequence[PeerServer]) -> None:
    """Start servers one after the other.

    Raises:
        ServerFailure: one of them did not start. Those that run are stopped.
    """
    for place, server in enumerate(servers):
        try:
            with progress(f"starting {server.name}", 1) as advance:
                run(server.start())
                advance()
        except BaseException:
            stop_all(run, servers[:place])
            raise


def stop_all(run: Run, servers: Sequence[PeerServer]) -> None:
    """Stop servers, the last one first."""
    for server in reversed(servers):
        run(server.stop())


def measure_turns(
    run: Run, servers: Sequence[PeerServer], prompts: Sequence[list[int]], num_tokens: int, quick: bool
) -> dict[str, list[Batch]]:
    """Have every server answer one stream at a time, by turns; return the batches of each. The first is not counted."""
    own_prompts = OwnPrompts(prompts)

    systems = {
        server.name: partial(answer_batch, run, server, num_tokens=NUM_QUICK_TOKENS if quick else num_tokens)
        for server in servers
    }
    num_batches = 1 if quick else MIN_PAIRS
    return take_turns("one stream", systems, [own_prompts.batch(1) for _ in range(num_batches)], [own_prompts.batch(1)])


def num_equal_texts(batches: Mapping[str, Sequence[Batch]], system: str, other: str) -> tuple[int, int]:
    """Return how many texts of two systems are equal, and how many there are."""
    texts = [[answer.token_ids for batch in batches[name] for answer in batch.answers] for name in (system, other)]
    return sum(ours == theirs for ours, theirs in zip(*texts, strict=True)), len(texts[0])
