"""Rows of the suite `peers`: what each server reached, specdec's ratio to every other one, and whose texts are equal.

Two texts are tied if they first differ at two tokens whose logits in the reference model lie within `TIE`: every server
sums in its own order, so either token is right.
Called by `bench.suites.peers.suite`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from bench.harness import pairs
from bench.harness.rows import Row
from bench.systems.process import Answer, tokens_per_s
from bench.systems.served import ALONE, DRAFTED, SPECDEC

#: Largest difference of two logits that the order of float32 sums may turn round.
TIE = 1e-3

LogitGap = Callable[[list[int], int, int], float]


class Match(StrEnum):
    """Result of comparing a text with the reference's."""

    EQUAL = "equal"
    TIED = "tied"
    DIFFERENT = "different"


def first_difference(text: Sequence[int], reference: Sequence[int]) -> int | None:
    """Return the first place at which two token sequences differ; None where one begins with the other."""
    return next((place for place, pair in enumerate(zip(text, reference, strict=False)) if pair[0] != pair[1]), None)


def compare(prompt: list[int], text: list[int], reference: list[int], logit_gap: LogitGap) -> Match:
    """Compare a greedy text with the reference's.

    Args:
        prompt: Token ids that both continue.
        text: Tokens of a server.
        reference: Tokens of the reference.
        logit_gap: Returns how much higher the reference's logit of one token is than that of another after a text.
    """
    place = first_difference(text, reference)
    if place is None:
        return Match.EQUAL if len(text) == len(reference) else Match.DIFFERENT
    gap = logit_gap([*prompt, *reference[:place]], reference[place], text[place])
    return Match.TIED if abs(gap) < TIE else Match.DIFFERENT


def count_matches(
    prompts: Sequence[list[int]], texts: Sequence[list[int]], references: Sequence[list[int]], logit_gap: LogitGap
) -> Counter[Match]:
    """Return how many texts are equal to the reference's, tied with it, and different."""
    triples = zip(prompts, texts, references, strict=True)
    return Counter(compare(prompt, text, reference, logit_gap) for prompt, text, reference in triples)


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
    rates = {name: [batch.tokens_per_s for batch in batches[name]] for name in (system, other)}
    return pairs.ratio_row(row, rates, system, other, required=required)
