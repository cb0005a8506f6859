"""One streamed answer as its client saw it, and the figures that a batch of them gives.

Every server client of this package returns these. Called by the clients and by `bench.suites.peers.suite`.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One stream; times count from the moment at which its batch was sent."""

    token_ids: list[int]
    chunk_s: list[float]
    """Time at which each chunk arrived."""
    chunk_tokens: list[int]
    """Number of tokens in each chunk."""

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0]

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first chunk."""
        num_later = sum(self.chunk_tokens[1:])
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(1, num_later)


class AnswerClock:
    """Collects the chunks of one stream with their times."""

    def __init__(self, began_s: float) -> None:
        """Start at `began_s`, a reading of `time.perf_counter`."""
        self._began_s = began_s
        self._token_ids: list[int] = []
        self._chunk_s: list[float] = []
        self._chunk_tokens: list[int] = []

    def take(self, token_ids: Iterable[int]) -> None:
        """Record a chunk that has just arrived; an empty one is ignored."""
        before = len(self._token_ids)
        self._token_ids += token_ids
        if len(self._token_ids) > before:
            self._chunk_s.append(time.perf_counter() - self._began_s)
            self._chunk_tokens.append(len(self._token_ids) - before)

    def answer(self, num_tokens: int) -> Answer:
        """Return the whole answer.

        Raises:
            RuntimeError: the stream ended with another number of tokens than were asked for.
        """
        if len(self._token_ids) != num_tokens:
            raise RuntimeError(f"the stream ended after {len(self._token_ids)} of {num_tokens} tokens")
        return Answer(self._token_ids, self._chunk_s, self._chunk_tokens)


def tokens_per_s(answers: Sequence[Answer]) -> float:
    """Return the tokens a second of a whole batch until the last stream's last token, prefill included."""
    return sum(len(answer.token_ids) for answer in answers) / max(answer.chunk_s[-1] for answer in answers)
