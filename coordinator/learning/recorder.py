"""Decides which requests go into the learning log, and makes their records.

A coordinator with a learning log has one recorder, used by `generation/generation_factory`. `turn_record` collects the
rounds of a request, and `log` writes files.
"""

from __future__ import annotations

import hashlib

from coordinator.learning.log import LearningLog
from coordinator.learning.turn_record import TurnRecord
from coordinator.replicas.pool import ReplicaPools
from coordinator.round.setting import RoundSetting
from specdec.contract.types import SamplingFilters
from specdec.learning.log_files import LogFacts


class Recorder:
    """Makes the records of one coordinator's requests. Used from one event loop."""

    def __init__(self, log: LearningLog, pools: ReplicaPools) -> None:
        self._log = log
        self._pools = pools

    def record(self, setting: RoundSetting, target_fingerprint: str, start: int) -> TurnRecord | None:
        """Return the record of a request; None if its distributions are of no use for other requests.

        Args:
            setting: parameters of the request's rounds.
            target_fingerprint: fingerprint of the target model.
            start: position of the next token.
        """
        if _is_individual(setting.filters):
            return None
        digest = hashlib.blake2b(f"{setting.tenant}\0{setting.session_id}".encode(), digest_size=8).digest()
        facts = LogFacts(target_fingerprint, self._pools.vocabulary_fingerprint, setting.vocabulary_size)
        session = int.from_bytes(digest)
        return TurnRecord(self._log, setting.tenant, facts, session, setting.filters.temperature, start)

    def close(self) -> None:
        """Close the log. Blocks for up to some seconds. Idempotent."""
        self._log.close()


def _is_individual(filters: SamplingFilters) -> bool:
    """Return whether the distribution depends on more than the model, the temperature and truncation."""
    masks = filters.min_new_tokens > 0 or bool(filters.constraint_id)
    return filters.uses_history or bool(filters.logit_bias) or masks
