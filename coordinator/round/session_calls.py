"""The position that a replica's request starts from: the committed tokens that the replica lacks are sent along.

`draft_calls` and `target_calls` make their calls through this module, which passes them to `specdec/rpc/client`. They
choose the replica and handle its failures themselves.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.replica import Replica
from coordinator.round.session_tokens import SessionTokens
from coordinator.round.setting import RoundSetting
from specdec.contract.constraint import Constraint
from specdec.contract.errors import ConstraintMiss, KvMiss, StaleEpoch
from specdec.contract.types import SessionPosition
from specdec.core.random import DrawKey

#: Time by which an epoch, the time of a store's server in µs, may be ahead of this machine's clock. A replica that
#: states a later one is wrong, and epochs must stay far below 2^53.
_MOST_CLOCK_AHEAD_S = 365 * 86_400.0

AnswerT = TypeVar("AnswerT")


class SessionCalls:
    """The calls of one request's rounds, to any replica. Only one round may use it at a time."""

    def __init__(self, setting: RoundSetting, tokens: SessionTokens, replicas: SessionReplicas) -> None:
        """`tokens` is shared with the generation, which extends it between rounds."""
        self._setting = setting
        self._tokens = tokens
        self._replicas = replicas
        self.epoch = setting.epoch
        """Epoch that the calls state; the generation raises it."""
        self.seen_epoch = 0
        """Newest epoch of the session that a replica has refused a call for."""

    @property
    def has_output(self) -> bool:
        """Return whether the request has committed output tokens."""
        return len(self._tokens) > self._setting.output_start

    @property
    def committed_len(self) -> int:
        """Return the number of tokens of the session that are decided."""
        return len(self._tokens)

    @property
    def draw_key(self) -> DrawKey:
        """Return the key of the draws of the round that begins after the committed tokens."""
        return self.draw_key_after(0)

    def draw_key_after(self, num_forced: int) -> DrawKey:
        """Return the key of the draws of a draft that begins after the committed tokens and some forced ones."""
        return DrawKey(self._setting.seed, self._setting.turn, len(self._tokens) + num_forced)

    async def call(
        self,
        replica: Replica[Any],
        round_id: int,
        send: Callable[[SessionPosition], Awaitable[AnswerT]],
        forced: Sequence[int] = (),
    ) -> AnswerT:
        """Make a call with what the replica lacks, and again if it lacks more tokens than was assumed, or the text of
        the constraint.

        Args:
            replica: replica to call.
            round_id: id of the round.
            send: makes the call.
            forced: tokens that follow the committed ones for certain, as if they were committed.

        Raises:
            KvMiss, ConstraintMiss: the replica lacks what was sent.
            SpecdecError, TimeoutError: as `send` raises.
        """
        constraint: Constraint | None = None
        lacked_tokens = False
        while True:
            try:
                return await send(self._position(replica, round_id, constraint, forced))
            except KvMiss as miss:
                if lacked_tokens:
                    raise
                lacked_tokens = True
                self._replicas.learn(replica, miss.have)
            except ConstraintMiss:
                if constraint is self._setting.constraint:
                    raise
                constraint = self._setting.constraint
            except StaleEpoch as stale:
                self._note_stale(stale)
                raise

    async def next_step(self, take: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Return the next step of a run. Raises as `take` does."""
        try:
            return await take()
        except StaleEpoch as stale:
            self._note_stale(stale)
            raise

    def _note_stale(self, stale: StaleEpoch) -> None:
        if stale.epoch < (time.time() + _MOST_CLOCK_AHEAD_S) * 1e6:
            self.seen_epoch = max(self.seen_epoch, stale.epoch)

    def _position(
        self, replica: Replica[Any], round_id: int, constraint: Constraint | None, forced: Sequence[int]
    ) -> SessionPosition:
        setting, tokens = self._setting, self._tokens
        start = self._replicas.start_for(replica, len(tokens))
        return SessionPosition(
            session_id=setting.session_id,
            epoch=self.epoch,
            round_id=round_id,
            start=start,
            prefix_hash=tokens.prefix_hash(start),
            token_ids=np.append(tokens.tail(start), np.array(forced, dtype=np.uint32)),
            filters=setting.filters,
            seed=setting.seed,
            turn=setting.turn,
            output_start=setting.output_start,
            draw_rule=setting.draw_rule,
            is_timed=setting.is_timed,
            tenant=setting.tenant,
            max_session_tokens=setting.max_session_tokens,
            constraint=constraint,
        )
