"""A live round that is verified again, and the verdict on it.

`turn_audit` copies the round, `audit_queue` holds it, and `distributions` or `distributions` compares it with a
target-only pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from coordinator.replicas.replica import TargetReplica
from coordinator.round.outcome import RoundOutcome
from coordinator.round.setting import RoundSetting
from specdec.contract.types import Mode, TokenIds


@dataclass(frozen=True, slots=True)
class AuditedRound:
    """A decided round of a live request."""

    request_id: str
    setting: RoundSetting
    token_ids: TokenIds
    """uint32 [n]: committed tokens before the round."""
    outcome: RoundOutcome
    replica: TargetReplica
    """Target replica of the session."""
    model: str
    """Fingerprint of the target model that the session uses."""

    @property
    def mode(self) -> str:
        """Label of the rule that decided the round: greedy, coupled, rejection or block."""
        if self.setting.filters.is_greedy:
            return "greedy"
        return (Mode.COUPLED if self.setting.answers_choices else self.setting.mode).name.lower()


class Result(StrEnum):
    """Result of one audit."""

    EQUAL = "equal"
    TIE = "tie"
    """The round differs only as far as rounding of the forward pass explains it."""
    MISMATCH = "mismatch"


class AuditedAcceptance(NamedTuple):
    """Accepted draft tokens of a round, beside the distribution that the target-only pass expects of them."""

    num_accepted: int
    expected: float
    variance: float


class Verdict(NamedTuple):
    """Comparison of a round with a target-only pass."""

    result: Result
    position: int = 0
    """Session position of the first difference; 0 if there is none."""
    difference: str = ""
    """Subject of the difference: choice, distribution, final_token or acceptance; "" if there is none."""
    acceptance: AuditedAcceptance | None = None
    """Set for rounds that carry distributions and have draft tokens."""
