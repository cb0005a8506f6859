"""Which requests are recorded, and as whose.

Not here: what is recorded of one (`turn_record`), files (`log`). One for a coordinator that keeps a learning log;
called by `generation/generation_factory`.
"""

from __future__ import annotations

import hashlib

from coordinator.learning.log import LearningLog
from coordinator.learning.turn_record import TurnRecord
from coordinator.replicas.pool import ReplicaPools
from coordinator.round.setting import RoundSetting
from specdec.learning.log_files import LogFacts
from specdec.types import SamplingFilters


class Recorder:
    """Makes the records of one coordinator's requests. Used from one event loop."""

    def __init__(self, log: LearningLog, pools: ReplicaPools) -> None:
        self._log = log
        self._pools = pools

    def record(self, setting: RoundSetting, target_fingerprint: str, start: int) -> TurnRecord | None:
        """The record of a request; None where its distributions say nothing of other requests' ones.

        Args:
            setting: of its rounds.
            target_fingerprint: of the model that answers it.
            start: position of the first token that is to come.
        """
        if _is_peculiar(setting.filters):
            return None
        digest = hashlib.blake2b(f"{setting.tenant}\0{setting.session_id}".encode(), digest_size=8).digest()
        facts = LogFacts(target_fingerprint, self._pools.vocabulary_fingerprint, setting.vocabulary_size)
        return TurnRecord(self._log, facts, int.from_bytes(digest), setting.filters.temperature, start)

    def close(self) -> None:
        """Blocks for a moment. Idempotent."""
        self._log.close()


def _is_peculiar(filters: SamplingFilters) -> bool:
    """Whether more than the model, the temperature and cuts decides the distribution."""
    return filters.uses_history or bool(filters.logit_bias) or filters.min_new_tokens > 0
