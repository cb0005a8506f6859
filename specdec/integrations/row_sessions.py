"""Match the rows of an engine's batch with sessions of the draft pool.

Engines propose for rows of a batch, and a request may move to another row between two steps. A session is found again
by its tokens: a row continues the session whose tokens it begins with. Called by `draft_pool`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from specdec.contract.types import DrawRule, ProposeRequest, SamplingFilters, SessionPosition, TokenIds
from specdec.core.chain import ChainHasher

#: Steps after which a session without a row is forgotten.
_KEPT_STEPS = 64

_GREEDY = SamplingFilters(temperature=0.0)


@dataclass(eq=False, slots=True)
class RowSession:
    """One request of the engine, as the draft pool knows it."""

    endpoint: str
    session_id: str = field(default_factory=lambda: f"engine-{secrets.token_hex(8)}")
    token_ids: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    """Tokens of the newest step, all of them committed."""
    known_len: int = 0
    """Number of leading tokens that the replica holds."""
    num_rounds: int = 0
    last_step: int = 0
    hasher: ChainHasher = field(default_factory=ChainHasher)

    def advance(self, token_ids: TokenIds, step: int) -> None:
        """Note the tokens of a new step, which continue the former ones."""
        self.hasher.extend(token_ids[len(self.token_ids) :])
        self.token_ids, self.last_step = token_ids, step
        self.num_rounds += 1

    def move(self, endpoint: str) -> None:
        """Continue at another replica, which holds nothing of the session."""
        self.endpoint, self.known_len = endpoint, 0

    def request(self, gamma: int) -> ProposeRequest:
        """Return the call of the newest step: the tokens that the replica lacks, and greedy draft tokens wanted."""
        start = min(self.known_len, len(self.token_ids) - 1)
        position = SessionPosition(
            session_id=self.session_id,
            epoch=1,
            round_id=self.num_rounds,
            start=start,
            prefix_hash=self.hasher.at(start) if start else b"",
            token_ids=self.token_ids[start:],
            filters=_GREEDY,
            seed=0,
            turn=0,
            output_start=0,
            draw_rule=DrawRule.DISTRIBUTION,
        )
        return ProposeRequest(position, gamma)


class RowSessions:
    """The sessions of an engine's requests."""

    def __init__(self) -> None:
        self._by_row: dict[int, RowSession] = {}
        self._step = 0

    def match(self, rows: Mapping[int, TokenIds], endpoint: str) -> dict[int, RowSession]:
        """Return the session of each row, advanced to the row's tokens.

        Args:
            rows: uint32 tokens of each row, the sampled ones included.
            endpoint: replica of sessions that begin now.
        """
        self._step += 1
        known = list(self._by_row.values())
        found: dict[int, RowSession] = {}
        for row, token_ids in rows.items():
            session = self._by_row.get(row)
            if session is None or session in found.values() or not _continues(token_ids, session):
                others = (each for each in known if each not in found.values() and _continues(token_ids, each))
                session = max(others, key=lambda each: len(each.token_ids), default=None) or RowSession(endpoint)
            found[row] = session
            session.advance(token_ids.copy(), self._step)
        kept = {row: each for row, each in self._by_row.items() if self._step - each.last_step < _KEPT_STEPS}
        left = {-1 - place: each for place, each in enumerate(kept.values()) if each not in found.values()}
        self._by_row = left | found
        return found


def _continues(token_ids: TokenIds, session: RowSession) -> bool:
    """Return whether tokens begin with all tokens of a session."""
    length = len(session.token_ids)
    return 0 < length <= len(token_ids) and np.array_equal(token_ids[:length], session.token_ids)
