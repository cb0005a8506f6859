"""What the target said in one turn, on its way to the learning log.

On the token path a round is one entry of a list; what it holds is looked into by the log's own thread. Not here: files
(`log`), which requests are recorded (`recorder`). Told of rounds by `generation/generation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.learning.log import LearningLog
from coordinator.round.tokens import SessionTokens
from specdec.learning.log_files import MAX_ENTRIES, LogFacts, LoggedTurn
from specdec.types import WEIGHT_TOTAL, Support, TokenIds, Verification

#: Rounds that are handed over together.
ROUNDS_A_PIECE = 16

#: Of a token's two arrays, beside what is in them.
BYTES_A_TOKEN = 256

#: Tokens before the turn's output that are kept with it.
MAX_CONTEXT_TOKENS = 2048


class SaidRound(NamedTuple):
    """A round's distributions as they came."""

    supports: Sequence[Support]
    verification: Verification
    num_tokens: int
    """That became the session's."""


class TurnRecord:
    """Of one generation, from where it begins or is resumed. Used from the event loop; what begins with `_log_` is done
    by the log's thread."""

    def __init__(self, log: LearningLog, facts: LogFacts, session: int, temperature: float, start: int) -> None:
        """
        Args:
            log: where it goes.
            facts: of the target that speaks.
            session: hash of its id.
            temperature: of the request.
            start: position of the first token that is to come; above 0.
        """
        self._log = log
        self._facts = facts
        self._session = session
        self._temperature = temperature
        self._start = start
        self._rounds: list[SaidRound] = []
        self._is_whole = True
        """No round was dropped."""
        self._num_bytes = 0
        self._num_entries: list[int] = []
        self._ids: list[TokenIds] = []
        self._weights: list[NDArray[np.uint32]] = []

    def note(self, supports: Sequence[Support], verification: Verification, num_tokens: int) -> None:
        """Takes in a round of which `num_tokens` tokens became the session's."""
        self._rounds.append(SaidRound(supports, verification, num_tokens))
        if len(self._rounds) >= ROUNDS_A_PIECE:
            self._hand_over()

    def end(self, tokens: SessionTokens, committed_len: int) -> None:
        """The turn is over, and so many tokens of its session are committed."""
        num_known = committed_len - self._start
        if num_known < 1:
            return
        self._hand_over()
        first = max(0, self._start - MAX_CONTEXT_TOKENS)
        token_ids = tokens.tail(first)[: committed_len - first]
        if not (self._is_whole and self._log.put(partial(self._log_turn, token_ids, self._start - first))):
            self._log.drop(num_known)

    def _hand_over(self) -> None:
        rounds, self._rounds = self._rounds, []
        if rounds and self._is_whole and not self._log.put(partial(self._log_rounds, rounds)):
            self._is_whole = False  # and never true again, whoever found out

    def _log_rounds(self, rounds: Sequence[SaidRound]) -> None:
        for supports, verification, num_tokens in rounds:
            for index in range(num_tokens):
                ids, weights = _entries(supports, verification, index)
                self._num_entries.append(len(ids))
                self._ids.append(ids)
                self._weights.append(weights)
                self._num_bytes += ids.nbytes + weights.nbytes + BYTES_A_TOKEN
        if not self._log.hold(self, self._num_bytes):
            self._is_whole = False
            self._num_entries, self._ids, self._weights = [], [], []

    def _log_turn(self, token_ids: TokenIds, start: int) -> None:
        num_known = len(token_ids) - start
        if not self._is_whole or len(self._num_entries) < num_known:
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
        self._log.add(self._facts, turn)


def _entries(
    supports: Sequence[Support], verification: Verification, index: int
) -> tuple[TokenIds, NDArray[np.uint32]]:
    """The likeliest entries of the target's distribution at one position of a round, as far as it was told."""
    if not verification.rows:
        share = min(1.0, float(verification.choice_probabilities[index]))
        ids, weights = verification.choice_token_ids[index : index + 1], np.array([share * WEIGHT_TOTAL])
    else:
        row = verification.rows[index]
        ids = supports[index].token_ids if index < len(supports) else np.empty(0, np.uint32)
        weights = row.weights[:-1].astype(np.float64)
        if row.tail_probability > 0.0 and row.tail_token_id not in ids:
            of_tail = min(row.tail_probability * WEIGHT_TOTAL, float(row.weights[-1]))  # rounding is the rest's
            ids, weights = np.append(ids, np.uint32(row.tail_token_id)), np.append(weights, of_tail)
    exact = np.floor(weights).astype(np.uint32)
    kept = np.argsort(exact, kind="stable")[::-1][:MAX_ENTRIES]
    kept = kept[exact[kept] > 0]
    return ids[kept].astype(np.uint32), exact[kept]
