"""The target's distributions in one turn, collected for the learning log.

`generation/generation` adds each round. On the token path that is one entry in a list; the log's own thread converts
the entries. `recorder` chooses the requests, and `log` writes the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.learning.log import LearningLog
from coordinator.round.session_tokens import SessionTokens
from specdec.contract.types import WEIGHT_TOTAL, Support, TokenIds, Verification
from specdec.learning.log_files import MAX_ENTRIES, LogFacts, LoggedTurn

#: Number of rounds that are passed to the log's thread together.
ROUNDS_PER_BATCH = 16

#: Size of the two arrays of a token without their contents.
BYTES_PER_TOKEN = 256

#: Largest number of tokens before the turn's output that are logged with it.
MAX_CONTEXT_TOKENS = 2048


class RecordedRound(NamedTuple):
    """The distributions of a round as they were received."""

    supports: Sequence[Support]
    verification: Verification
    num_tokens: int
    """Number of tokens that were added to the session."""


class TurnRecord:
    """The record of one generation, from where it begins or is resumed.

    Used from the event loop; the log's thread runs the methods whose names begin with `_log_`.
    """

    def __init__(
        self, log: LearningLog, tenant: str, facts: LogFacts, session: int, temperature: float, start: int
    ) -> None:
        """
        Args:
            log: log of all tenants.
            tenant: tenant whose segments get the turn.
            facts: facts about the target.
            session: hash of the session's id.
            temperature: temperature of the request.
            start: position of the next token; above 0.
        """
        self._log = log
        self._tenant = tenant
        self._facts = facts
        self._session = session
        self._temperature = temperature
        self._start = start
        self._rounds: list[RecordedRound] = []
        self._is_complete = True
        """True while no round was dropped."""
        self._num_bytes = 0
        self._num_entries: list[int] = []
        self._ids: list[TokenIds] = []
        self._weights: list[NDArray[np.uint32]] = []

    def note(self, supports: Sequence[Support], verification: Verification, num_tokens: int) -> None:
        """Add a round of which `num_tokens` tokens were added to the session."""
        self._rounds.append(RecordedRound(supports, verification, num_tokens))
        if len(self._rounds) >= ROUNDS_PER_BATCH:
            self._hand_over()

    def end(self, tokens: SessionTokens, committed_len: int) -> None:
        """End the turn; `committed_len`: number of committed tokens of the session."""
        num_known = committed_len - self._start
        if num_known < 1:
            return
        self._hand_over()
        first = max(0, self._start - MAX_CONTEXT_TOKENS)
        token_ids = tokens.tail(first)[: committed_len - first]
        if not (self._is_complete and self._log.put(partial(self._log_turn, token_ids, self._start - first))):
            self._log.drop(num_known)

    def _hand_over(self) -> None:
        rounds, self._rounds = self._rounds, []
        if rounds and self._is_complete and not self._log.put(partial(self._log_rounds, rounds)):
            self._is_complete = False  # both threads may set it, and none sets it back

    def _log_rounds(self, rounds: Sequence[RecordedRound]) -> None:
        for supports, verification, num_tokens in rounds:
            for index in range(num_tokens):
                ids, weights = _entries(supports, verification, index)
                self._num_entries.append(len(ids))
                self._ids.append(ids)
                self._weights.append(weights)
                self._num_bytes += ids.nbytes + weights.nbytes + BYTES_PER_TOKEN
        if not self._log.hold(self, self._num_bytes):
            self._is_complete = False
            self._num_entries, self._ids, self._weights = [], [], []

    def _log_turn(self, token_ids: TokenIds, start: int) -> None:
        num_known = len(token_ids) - start
        if not self._is_complete or len(self._num_entries) < num_known:
            self._log.drop(num_known)
            return
        turn = LoggedTurn(
            session=self._session,
            temperature=self._temperature,
            token_ids=token_ids,
            start=start,
            num_entries=np.array(self._num_entries[:num_known], dtype=np.uint8),
            entry_ids=np.concatenate(self._ids[:num_known]),
            entry_weights=np.concatenate(self._weights[:num_known]),
        )
        self._log.add(self._tenant, self._facts, turn)


def _entries(
    supports: Sequence[Support], verification: Verification, index: int
) -> tuple[TokenIds, NDArray[np.uint32]]:
    """Return the top entries of the target's distribution at one position of a round, as far as they were sent."""
    if not verification.rows:
        share = min(1.0, float(verification.choice_probabilities[index]))
        ids, weights = verification.choice_token_ids[index : index + 1], np.array([share * WEIGHT_TOTAL])
    else:
        row = verification.rows[index]
        ids = supports[index].token_ids if index < len(supports) else np.empty(0, np.uint32)
        weights = row.weights[:-1].astype(np.float64)
        if row.tail_probability > 0.0 and row.tail_token_id not in ids:
            tail_weight = min(row.tail_probability * WEIGHT_TOTAL, float(row.weights[-1]))  # at most the tail mass
            ids, weights = np.append(ids, np.uint32(row.tail_token_id)), np.append(weights, tail_weight)
    exact = np.floor(weights).astype(np.uint32)
    kept = np.argsort(exact, kind="stable")[::-1][:MAX_ENTRIES]
    kept = kept[exact[kept] > 0]
    return ids[kept].astype(np.uint32), exact[kept]
