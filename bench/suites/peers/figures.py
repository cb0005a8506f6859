"""Rows of the suite `peers`: what each server reached, and specdec's ratio to every other one.

Called by `bench.suites.peers.suite`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.harness.pairs import median_ratio
from bench.harness.rows import Row
from bench.suites.peers.texts import Match
from bench.systems.answers import Answer, tokens_per_s

SPECDEC = "specdec"
DRAFTED, ALONE = "_drafted", "_alone"

MakeRow = Callable[..., Row]


@dataclass(frozen=True)
class Batch:
    """One batch of streams on one server."""

    prompts: Sequence[list[int]]
    answers: Sequence[Answer]
    cpu_s: float
    """Processor seconds that the server used for it."""

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_s(self.answers)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


def comparison_rows(row: MakeRow, batches: Mapping[str, Sequence[Batch]]) -> list[Row]:
    """Return the ratios of specdec's systems to their peers, and of drafted to alone, in one case."""
    return [ratio_row(row, batches, system, other) for system, other in _compared(list(batches))]


def batch_rows(row: MakeRow, batches: Mapping[str, Sequence[Batch]]) -> list[Row]:
    """Return rates, times and processor time of the systems that took turns in one case."""
    rows = []
    for name, done in batches.items():
        ttft_ms = [answer.ttft_s * 1e3 for batch in done for answer in batch.answers]
        tpot_ms = [answer.tpot_s * 1e3 for batch in done for answer in batch.answers]
        figures = {
            "tokens_per_s": (float(np.median([batch.tokens_per_s for batch in done])), "tokens/s"),
            "ttft_ms_p50": (float(np.median(ttft_ms)), "ms"),
            "tpot_ms_p50": (float(np.median(tpot_ms)), "ms"),
            "tpot_ms_p99": (float(np.quantile(tpot_ms, 0.99)), "ms"),
            "cpu_ms_per_token": (
                sum(batch.cpu_s for batch in done) * 1e3 / sum(batch.num_tokens for batch in done),
                "ms",
            ),
        }
        rows += [row(system=name, metric=key, value=value, unit=unit) for key, (value, unit) in figures.items()]
    return rows


def server_rows(row: MakeRow, name: str, start_s: float, pss_bytes: int) -> list[Row]:
    """Return how long a server took to start and how much memory it holds after its batches."""
    return [
        row(system=name, metric="start_s", value=start_s, unit="s"),
        row(system=name, metric="memory_mib", value=pss_bytes / 2**20, unit="MiB (PSS)"),
    ]


def text_rows(row: MakeRow, name: str, reference: str, matches: Counter[Match], must_match: bool) -> list[Row]:
    """Return how many of a server's texts were the reference's, and how many tied with it.

    Args:
        row: Makes a row.
        name: The system.
        reference: The system whose texts it was compared with.
        matches: What the comparison gave.
        must_match: The row falls short when a text is neither equal nor tied.
    """
    num_texts = matches.total()
    right = (matches[Match.EQUAL] + matches[Match.TIED]) / num_texts
    required = 1.0 if must_match else None
    unit = f"of {num_texts}"
    return [
        row(system=name, metric="texts_equal", value=matches[Match.EQUAL], unit=unit, ratio_to=reference),
        row(system=name, metric="texts_tied", value=matches[Match.TIED], unit=unit, ratio_to=reference),
        row(
            system=name, metric="texts_same", value=right, unit="share", ratio_to=reference,
            required=required,
        ),
    ]  # fmt: skip


def _compared(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return each of specdec's systems against each peer of the same decoding, and drafted against alone."""
    ours = [name for name in names if name.startswith(SPECDEC)]
    peers = [name for name in names if name not in ours]
    pairs = [
        (name, peer)
        for suffix in (DRAFTED, ALONE)
        for name in ours
        for peer in peers
        if name.endswith(suffix) and peer.endswith(suffix)
    ]
    both = [(name, name.removesuffix(DRAFTED) + ALONE) for name in ours if name.endswith(DRAFTED)]
    return pairs + [pair for pair in both if pair[1] in ours]


def ratio_row(
    row: MakeRow, batches: Mapping[str, Sequence[Batch]], system: str, other: str, required: float | None = None
) -> Row:
    """Return a system's tokens a second over another one's."""
    ratio = median_ratio(*([batch.tokens_per_s for batch in batches[name]] for name in (system, other)))
    return row(
        system=system, metric="tokens_per_s_ratio", value=ratio.median, unit="x", ratio_to=other, low=ratio.low,
        high=ratio.high, num_pairs=ratio.num_pairs, required=required,
    )  # fmt: skip
