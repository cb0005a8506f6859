"""Chooses which rounds are audited, and copies what an audit of them needs.

`generation/generation_factory` makes one `TurnAudit` a request, and `generation/generation` reports the rounds. The
rounds go to `audit_queue`.
"""

from __future__ import annotations

import random

from coordinator.audit.audit_queue import AuditQueue
from coordinator.audit.audited_round import AuditedRound
from coordinator.replicas.placement import SessionReplicas
from coordinator.round.outcome import RoundOutcome
from coordinator.round.session_tokens import SessionTokens
from coordinator.round.setting import RoundSetting
from specdec.contract.errors import Unavailable


class Auditor:
    """The audit of one coordinator's rounds. Used from one event loop."""

    def __init__(self, queue: AuditQueue, share: float) -> None:
        """`share`: share of the rounds that are audited, 0..1."""
        self.queue = queue
        self._share = share
        self._random = random.Random()  # apart from every request's draws

    def turn(
        self, request_id: str, setting: RoundSetting, tokens: SessionTokens, replicas: SessionReplicas
    ) -> TurnAudit:
        """Return the audit of one request."""
        return TurnAudit(self, request_id, setting, tokens, replicas)

    def chooses_round(self) -> bool:
        """Return whether the next round is audited."""
        return self._random.random() < self._share


class TurnAudit:
    """The audit of one request. Used by one generation."""

    def __init__(
        self,
        auditor: Auditor,
        request_id: str,
        setting: RoundSetting,
        tokens: SessionTokens,
        replicas: SessionReplicas,
    ) -> None:
        """
        Args:
            auditor: chooses rounds and holds the queue.
            request_id: id of the request.
            setting: parameters of the request's rounds.
            tokens: tokens of the session; shared with the generation, which extends them.
            replicas: replicas of the session.
        """
        self._auditor = auditor
        self._request_id = request_id
        self._setting = setting
        self._tokens = tokens
        self._replicas = replicas

    def note(self, outcome: RoundOutcome, num_tokens: int) -> None:
        """Audit a round, if it is chosen, of which `num_tokens` tokens were added to the session."""
        self._auditor.queue.note_round_ended()
        if not self._auditor.chooses_round():
            return
        try:
            replica = self._replicas.choose_target()
        except Unavailable:
            return  # the target was lost right after its answer
        before = self._tokens.tail(0)[: len(self._tokens) - num_tokens]
        self._auditor.queue.put(
            AuditedRound(self._request_id, self._setting, before, outcome, replica, self._replicas.target_fingerprint)
        )
