"""Servers that answer the same batches by turns. Called by the parts of the suite `engines`."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from bench.pairs import MIN_PAIRS, interleave, median_ratio
from bench.report import progress
from bench.rows import Row
from bench.servers.figures import Batch
from bench.servers.process import PeerServer
from bench.workload import OwnPrompts

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end in the suite's event loop."""

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

    def batch(server: PeerServer, asked: list[list[int]]) -> Batch:
        before_s = server.cpu_s()
        answers = run(server.answer(asked, NUM_QUICK_TOKENS if quick else num_tokens))
        done = Batch(asked, answers, server.cpu_s() - before_s)
        run(server.settle())
        return done

    systems = {server.name: partial(batch, server) for server in servers}
    num_batches = 1 if quick else MIN_PAIRS
    with progress("one stream", (1 + num_batches) * len(systems)) as advance:
        interleave([own_prompts.batch(1)], systems, advance)
        return interleave([own_prompts.batch(1) for _ in range(num_batches)], systems, advance)


def ratio_row(
    make_row: Callable[..., Row],
    batches: Mapping[str, Sequence[Batch]],
    system: str,
    other: str,
    required: float | None = None,
) -> Row:
    """Return a system's tokens a second over another one's."""
    ratio = median_ratio(*([batch.tokens_per_s for batch in batches[name]] for name in (system, other)))
    return make_row(
        system=system, metric="tokens_per_s_ratio", value=ratio.median, unit="x", ratio_to=other, low=ratio.low,
        high=ratio.high, num_pairs=ratio.num_pairs, required=required,
    )  # fmt: skip


def num_equal_texts(batches: Mapping[str, Sequence[Batch]], system: str, other: str) -> tuple[int, int]:
    """Return how many texts of two systems are equal, and how many there are."""
    texts = [[answer.token_ids for batch in batches[name] for answer in batch.answers] for name in (system, other)]
    return sum(ours == theirs for ours, theirs in zip(*texts, strict=True)), len(texts[0])
