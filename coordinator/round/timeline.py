"""The timeline of a round: the coordinator's own times, and between them those that its replicas report.

A replica has a clock of its own. Its times are placed in the middle of the call as the coordinator measured it, as if
the request took as long on the wire as the answer. The `runner` and `publisher` record times, and
`generation/request_trace` makes spans of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.contract.types import Stages


@dataclass(slots=True)
class CallTimeline:
    """One call; times in seconds of `time.monotonic`."""

    sent_s: float
    """Time at which the request was written to the stream; of the second attempt if there were two."""
    heard_s: float
    """Time at which the answer had been read from the stream."""
    stages: Stages | None
    replica: str
    """HOST:PORT of the replica that answered."""

    @property
    def replica_interval_s(self) -> tuple[float, float]:
        """Times at which the replica had read the request and handed over its answer, on the coordinator's clock.

        Without times of the replica, the interval is that of the whole call.
        """
        if self.stages is None:
            return self.sent_s, self.heard_s
        received_s = self.sent_s + self._way_s
        return received_s, received_s + min(self.stages.sent_s, self.heard_s - self.sent_s)

    @property
    def _way_s(self) -> float:
        """Time of the request on the wire, assumed to equal that of the answer."""
        return max(0.0, self.heard_s - self.sent_s - (self.stages.sent_s if self.stages else 0.0)) / 2


@dataclass(slots=True)
class RoundTimeline:
    """One round; times in seconds of `time.monotonic`."""

    began_s: float
    draft: CallTimeline | None = None
    """None if no draft replica was called, or none answered."""
    target: CallTimeline | None = None
    decided_s: float = 0.0
    committed_s: float = 0.0
    shown_s: float = 0.0

    def note_draft(self, sent_s: float, heard_s: float, stages: Stages | None, replica: str) -> None:
        """Record the times of the draft call; `replica` is "" if no draft replica answered."""
        if replica:
            self.draft = CallTimeline(sent_s, heard_s, stages, replica)

    def note_target(self, sent_s: float, heard_s: float, stages: Stages | None, replica: str) -> None:
        """Record the times of the target call, whose verification has just arrived."""
        self.target = CallTimeline(sent_s, heard_s, stages, replica)
