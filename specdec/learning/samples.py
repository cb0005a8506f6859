"""Turn a tenant's learning log into batches of token rows with the target's distributions, to train a draft on.

Some sessions are held out for evaluation, always with all of their turns. The choice of a session does not change as
the log grows. `log_files` reads the files; `training` and `training` use the batches. Uses numpy only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import InvalidRequest, VocabularyMismatch
from specdec.contract.types import WEIGHT_TOTAL, TokenIds
from specdec.learning.log_files import SUFFIX, LogFacts, LoggedTurn, read_segment, tenant_folder

#: Maximum number of tokens in a row, and of those at its end whose distributions are learned. The others are context.
ROW_TOKENS = 512
LEARNED_TOKENS = 384

#: About one session in this number is held out.
HELD_OUT_OF = 8


@dataclass(frozen=True, slots=True)
class Row:
    """N tokens and the target's logged distributions of the last M of them."""

    token_ids: TokenIds
    """[N], N at most `ROW_TOKENS`."""
    temperature: float
    num_entries: NDArray[np.uint8]
    """[M]: number of entries of each distribution."""
    entry_ids: TokenIds
    """[sum of num_entries]: token ids of the entries."""
    entry_weights: NDArray[np.uint32]
    """[sum of num_entries]: weights of the entries."""

    @property
    def num_learned(self) -> int:
        """Number M of tokens with a distribution."""
        return len(self.num_entries)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """B rows of T tokens, and the M distributions that are learned from them."""

    token_ids: NDArray[np.int64]
    """[B, T], padded with 0 at the end of a row."""
    places: NDArray[np.int64]
    """[M]: index in [B * T] of the token before each learned one."""
    temperatures: NDArray[np.float32]
    """[M]; 0: greedy."""
    entry_ids: NDArray[np.int64]
    """[M, K]: token ids of the entries, padded with 0."""
    shares: NDArray[np.float32]
    """[M, K]: probabilities of the entries, padded with 0."""

    def beyond(self, position: int) -> TrainingBatch:
        """Return a batch with the same tokens and only the places that are after `position` in their rows."""
        kept = self.places % self.token_ids.shape[1] > position
        columns = (self.places, self.temperatures, self.entry_ids, self.shares)
        return TrainingBatch(self.token_ids, *(column[kept] for column in columns))


class Samples:
    """The rows of a tenant's log that have been read so far."""

    def __init__(
        self, log: Path, tenant: str, vocabulary_fingerprint: str, num_tokens: int, target_fingerprint: str = ""
    ) -> None:
        """
        Args:
            log: folder of the logs of all tenants.
            tenant: tenant whose log is read.
            vocabulary_fingerprint: fingerprint of the draft's vocabulary.
            num_tokens: vocabulary size of the draft.
            target_fingerprint: target whose turns are used; "" if the log has turns of one target only.

        Raises:
            InvalidRequest: the log does not exist or has no turns of that target; it has turns of several targets and
                none is named; it has turns of one session only; or a segment is damaged.
            VocabularyMismatch: the log has another vocabulary than the draft.
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
        """Add the segments that were written since the last call. Raise as the constructor for an unusable segment."""
        self._add(self._of_target(self._read_new()))

    def batches(self, batch_tokens: int, dice: np.random.Generator) -> Iterator[TrainingBatch]:
        """Yield one pass over the training rows in batches, in a new random order each time."""
        return batches_of([self.learned[index] for index in dice.permutation(len(self.learned))], batch_tokens)

    def _add(self, turns: Sequence[LoggedTurn]) -> None:
        for turn in turns:
            (self.held_out if turn.session <= self._held_out_up_to else self.learned).extend(_rows(turn))

    def _read_new(self) -> list[tuple[LogFacts, list[LoggedTurn]]]:
        found = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if path.name not in self._seen:
                self._seen.add(path.name)
                with contextlib.suppress(FileNotFoundError):  # the segment expired
                    found.append(read_segment(path))
        return found

    def _target_of(self, there_are: Collection[str]) -> str:
        """Return the target whose turns are used, from the targets that are in the log."""
        named, logged = self.target_fingerprint, " and ".join(sorted(there_are))
        if not there_are:
            raise InvalidRequest(f"--log: the learning log in {self._folder} is empty", field="log")
        if named and named not in there_are:
            raise InvalidRequest(
                f"--target: {self._folder} has no turns of target {named}, only of {logged}", field="target"
            )
        if not named and len(there_are) > 1:
            raise InvalidRequest(
                f"--log: {self._folder} has turns of several targets, {logged}: choose one with --target",
                field="target",
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


def batches_of(rows: Sequence[Row], batch_tokens: int) -> Iterator[TrainingBatch]:
    """Yield the rows in order, in batches of at most `batch_tokens` tokens with padding, but at least one row."""
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


def _batch(rows: Sequence[Row]) -> TrainingBatch:
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
    return TrainingBatch(
        token_ids=token_ids,
        places=np.concatenate([np.arange(end - count, end) - 1 for end, count in zip(ends, learned, strict=True)]),
        temperatures=np.repeat(np.array([row.temperature for row in rows], np.float32), learned),
        entry_ids=entry_ids,
        shares=shares,
    )
