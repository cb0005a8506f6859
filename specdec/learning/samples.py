"""What a draft is trained on: a tenant's learning log as rows of tokens with the target's distributions, in batches.

Some sessions are held out, all turns of one or none; which they are stays as the log grows. Not here: files
(`specdec.learning.log_files`), the loss (`distillation`). numpy alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specdec.errors import InvalidRequest, VocabularyMismatch
from specdec.learning.log_files import SUFFIX, LogFacts, LoggedTurn, read_segment, tenant_folder
from specdec.types import WEIGHT_TOTAL, TokenIds

#: Tokens of a row, and of those at its end whose distributions are learned: the others are what came before.
ROW_TOKENS = 512
LEARNED_TOKENS = 384

#: One session in so many is held out.
HELD_OUT_OF = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens and, of the last M of them, the target's distributions, as they were logged."""

    token_ids: TokenIds
    """[N], N at most `ROW_TOKENS`."""
    temperature: float
    num_entries: NDArray[np.uint8]
    """[M]"""
    entry_ids: TokenIds
    """[sum of num_entries]"""
    entry_weights: NDArray[np.uint32]
    """Beside the ids."""

    @property
    def num_learned(self) -> int:
        """M"""
        return len(self.num_entries)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows side by side."""

    token_ids: NDArray[np.int64]
    """[B, T], filled up with 0 at the end."""
    places: NDArray[np.int64]
    """[M]: index in [B * T] of the token before each one that is learned."""
    temperatures: NDArray[np.float32]
    """[M]; 0: greedy."""
    entry_ids: NDArray[np.int64]
    """[M, K]"""
    shares: NDArray[np.float32]
    """[M, K]"""

    def beyond(self, position: int) -> Batch:
        """The same tokens, and of the places those further on in their rows than `position`."""
        kept = self.places % self.token_ids.shape[1] > position
        columns = (self.places, self.temperatures, self.entry_ids, self.shares)
        return Batch(self.token_ids, *(column[kept] for column in columns))


class Samples:
    """The rows of a tenant's log, as far as it has been read."""

    def __init__(
        self, log: Path, tenant: str, vocabulary_fingerprint: str, num_tokens: int, target_fingerprint: str = ""
    ) -> None:
        """
        Args:
            log: folder of the logs of all tenants.
            tenant: whose log is read.
            vocabulary_fingerprint: of what is to learn.
            num_tokens: that it has words for.
            target_fingerprint: of the model whose words count; "" for the only one there is.

        Raises:
            InvalidRequest: there is no log; or nothing of that model in it; or words of several models, and none is
                named; or of one session alone; or a segment is damaged.
            VocabularyMismatch: the log's tokens are others.
        """
        self._folder = tenant_folder(log, tenant)
        self._vocabulary, self._num_tokens = vocabulary_fingerprint, num_tokens
        self.target_fingerprint = target_fingerprint
        self._seen: set[str] = set()
        self.learned: list[Row] = []
        self.held_out: list[Row] = []
        if not self._folder.is_dir():
            raise InvalidRequest(f"--log: found no learning log in {self._folder}", field="log")
        found = self._read_new()
        self.target_fingerprint = self._target_of({facts.target_fingerprint for facts, _ in found})
        turns = self._of_target(found)
        sessions = sorted({turn.session for turn in turns})
        if len(sessions) < 2:
            raise InvalidRequest(
                f"--log: {self._folder} has turns of only one session; at least two are needed, to hold one out",
                field="log",
            )
        self._held_out_up_to = sessions[(len(sessions) - 1) // HELD_OUT_OF]
        self._add(turns)

    def read_on(self) -> None:
        """Takes in what the target has said since. Raises as the constructor where a segment is no good."""
        self._add(self._of_target(self._read_new()))

    def batches(self, batch_tokens: int, dice: np.random.Generator) -> Iterator[Batch]:
        """One pass over what is learned, in another order each time."""
        return batches_of([self.learned[index] for index in dice.permutation(len(self.learned))], batch_tokens)

    def _add(self, turns: Sequence[LoggedTurn]) -> None:
        for turn in turns:
            (self.held_out if turn.session <= self._held_out_up_to else self.learned).extend(_rows(turn))

    def _read_new(self) -> list[tuple[LogFacts, list[LoggedTurn]]]:
        found = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if path.name not in self._seen:
                self._seen.add(path.name)
                with contextlib.suppress(FileNotFoundError):  # its time was over
                    found.append(read_segment(path))
        return found

    def _target_of(self, there_are: Collection[str]) -> str:
        """The target whose words count, of those that are in the log."""
        named, told = self.target_fingerprint, " and ".join(sorted(there_are))
        if not there_are:
            raise InvalidRequest(f"--log: the learning log in {self._folder} is empty", field="log")
        if named and named not in there_are:
            raise InvalidRequest(
                f"--target: {self._folder} has no turns of target {named}, only of {told}", field="target"
            )
        if not named and len(there_are) > 1:
            raise InvalidRequest(
                f"--log: {self._folder} has turns of several targets, {told}: choose one with --target", field="target"
            )
        return named or next(iter(there_are))

    def _of_target(self, found: Sequence[tuple[LogFacts, list[LoggedTurn]]]) -> list[LoggedTurn]:
        own = [(facts, turns) for facts, turns in found if facts.target_fingerprint == self.target_fingerprint]
        for facts, _ in own:
            if facts.vocabulary_fingerprint != self._vocabulary:
                raise VocabularyMismatch(
                    f"--log: its vocabulary has fingerprint {facts.vocabulary_fingerprint}, that of the draft to "
                    f"train {self._vocabulary}"
                )
            if facts.vocabulary_size > self._num_tokens:
                raise InvalidRequest(
                    f"--log: {self._folder} has a vocabulary of {facts.vocabulary_size} tokens, that of the draft has "
                    f"{self._num_tokens}",
                    field="log",
                )
        return [turn for _, turns in own for turn in turns]


def batches_of(rows: Sequence[Row], batch_tokens: int) -> Iterator[Batch]:
    """The rows in their order, in batches of so many tokens at most, what fills them up included; one row at least."""
    waiting: list[Row] = []
    for row in rows:
        longest = max(len(each.token_ids) for each in (*waiting, row))
        if waiting and (len(waiting) + 1) * longest > batch_tokens:
            yield _batch(waiting)
            waiting = []
        waiting.append(row)
    if waiting:
        yield _batch(waiting)


def _rows(turn: LoggedTurn) -> Iterator[Row]:
    ends = np.concatenate([[0], np.cumsum(turn.num_entries, dtype=np.int64)]).tolist()
    for first in range(0, len(turn.num_entries), LEARNED_TOKENS):
        last = min(first + LEARNED_TOKENS, len(turn.num_entries))
        end = turn.start + last
        yield Row(
            turn.token_ids[max(0, end - ROW_TOKENS) : end],
            turn.temperature,
            turn.num_entries[first:last],
            turn.entry_ids[ends[first] : ends[last]],
            turn.entry_weights[ends[first] : ends[last]],
        )


def _batch(rows: Sequence[Row]) -> Batch:
    width = max(len(row.token_ids) for row in rows)
    token_ids = np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        token_ids[index, : len(row.token_ids)] = row.token_ids
    ends = [index * width + len(row.token_ids) for index, row in enumerate(rows)]
    learned = [row.num_learned for row in rows]
    counts = np.concatenate([row.num_entries for row in rows]).astype(np.int64)
    is_there = np.arange(max(1, counts.max())) < counts[:, None]  # [M, K]
    entry_ids, shares = np.zeros(is_there.shape, np.int64), np.zeros(is_there.shape, np.float32)
    entry_ids[is_there] = np.concatenate([row.entry_ids for row in rows])
    shares[is_there] = np.concatenate([row.entry_weights for row in rows]) / WEIGHT_TOTAL
    return Batch(
        token_ids=token_ids,
        places=np.concatenate([np.arange(end - count, end) - 1 for end, count in zip(ends, learned, strict=True)]),
        temperatures=np.repeat(np.array([row.temperature for row in rows], np.float32), learned),
        entry_ids=entry_ids,
        shares=shares,
    )
