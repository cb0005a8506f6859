"""Asking a replica from where it stands in the session: it is sent the committed tokens that it lacks.

A call comes from `draft_calls` or `target_calls` and goes through `specdec/rpc/client` to the replica; the answer goes
back the same way. Not here: which replica is asked, deadlines, what becomes of a failure (`draft_calls`,
`target_calls`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from coordinator.replicas.placement import SessionReplicas
from coordinator.replicas.replica import Replica
from coordinator.round.setting import RoundSetting
from coordinator.round.tokens import SessionTokens
from specdec.errors import KvMiss
from specdec.types import SessionPosition

AnswerT = TypeVar("AnswerT")


class SessionCalls:
    """The calls of one request's rounds, to any replica. One round at a time."""

    def __init__(self, setting: RoundSetting, tokens: SessionTokens, replicas: SessionReplicas) -> None:
        """`tokens` is shared with whoever extends it between rounds."""
        self._setting = setting
        self._tokens = tokens
        self._replicas = replicas

    async def ask(
        self, replica: Replica[Any], round_id: int, send: Callable[[SessionPosition], Awaitable[AnswerT]]
    ) -> AnswerT:
        """Sends what the replica lacks, and once more if it lacks more than we thought.

        Args:
            replica: to be asked.
            round_id: of the round.
            send: makes the call.

        Raises:
            KvMiss: it lacked tokens twice.
            SpecdecError, TimeoutError: what `send` raises.
        """
        try:
            return await send(self._position(replica, round_id))
        except KvMiss as miss:
            self._replicas.learn(replica, miss.have)
            return await send(self._position(replica, round_id))

    def _position(self, replica: Replica[Any], round_id: int) -> SessionPosition:
        setting, tokens = self._setting, self._tokens
        start = self._replicas.start_for(replica, len(tokens))
        return SessionPosition(
            session_id=setting.session_id,
            epoch=setting.epoch,
            round_id=round_id,
            start=start,
            prefix_hash=tokens.prefix_hash(start),
            token_ids=tokens.tail(start),
            filters=setting.filters,
            seed=setting.seed,
            turn=setting.turn,
            output_start=setting.output_start,
            draw_rule=setting.draw_rule,
            is_timed=setting.is_timed,
            tenant=setting.tenant,
        )
