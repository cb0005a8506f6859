"""The timeline of a round: the coordinator's own times, and between them those that its replicas report.

A replica has a clock of its own. Its times are placed in the middle of the call as the coordinator measured it, as if
the request took as long on the wire as the answer. The `runner` and `publisher` record times, `TimelineLog` writes one
JSON line per round, and `specdec timeline` draws them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from specdec.contract.errors import InvalidRequest
from specdec.contract.tenant import SessionKey
from specdec.contract.types import Stages

#: Largest number of rounds that are buffered before they are written.
_MAX_LINES = 64

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CallTimeline:
    """One call; times in seconds of `time.monotonic`."""

    asked_s: float
    """Time at which the round began the call."""
    sent_s: float
    """Time at which the request was written to the stream; of the second attempt where there were two."""
    heard_s: float
    """Time at which the answer had been read from the stream."""
    answered_s: float
    """Time at which the round had the answer."""
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

    def offsets_us(self, began_s: float) -> dict[str, int]:
        """Return the known times in microseconds since the round began; a replica's times are named `replica_...`."""
        at_s = {"asked": self.asked_s, "sent": self.sent_s, "heard": self.heard_s, "answered": self.answered_s}
        if self.stages is not None:
            way_s = self._way_s
            for name, stage_s in self.stages._asdict().items():
                at_s[f"replica_{name.removesuffix('_s')}"] = self.sent_s + way_s + stage_s
        return {name: round((at - began_s) * 1e6) for name, at in at_s.items()}

    @property
    def _way_s(self) -> float:
        """Time of the request on the wire, assumed to equal that of the answer."""
        return max(0.0, self.heard_s - self.sent_s - (self.stages.sent_s if self.stages else 0.0)) / 2


@dataclass(slots=True)
class RoundTimeline:
    """One round; times in seconds of `time.monotonic`."""

    began_s: float
    drafted_s: float = 0.0
    draft: CallTimeline | None = None
    """None where no draft replica was called, or none answered."""
    target: CallTimeline | None = None
    decided_s: float = 0.0
    committed_s: float = 0.0
    shown_s: float = 0.0

    def note_draft(self, sent_s: float, heard_s: float, stages: Stages | None, replica: str) -> None:
        """Record the times of the draft call; `replica` is "" where no draft replica answered."""
        self.drafted_s = time.monotonic()
        if replica:
            self.draft = CallTimeline(self.began_s, sent_s, heard_s, self.drafted_s, stages, replica)

    def note_target(self, sent_s: float, heard_s: float, stages: Stages | None, replica: str) -> None:
        """Record the times of the target call, whose verification has just arrived."""
        self.target = CallTimeline(self.drafted_s, sent_s, heard_s, time.monotonic(), stages, replica)


class TimelineLog:
    """A file of timelines, one JSON object per line. Used from one event loop."""

    def __init__(self, path: Path) -> None:
        """Open the file for appending.

        Raises:
            InvalidRequest: the file cannot be written.
        """
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise InvalidRequest(f"timeline {path}: {error.strerror}", field="timeline") from error
        self._lines: list[str] = []
        self._has_warned = False

    def write(self, key: SessionKey, round_id: int, num_draft_tokens: int, timeline: RoundTimeline) -> None:
        """Add a round after its tokens were shown; times are microseconds since the round began."""
        began_s = timeline.began_s
        line = {
            "tenant": key.tenant,
            "session_id": key.session_id,
            "round_id": round_id,
            "began_us": round(began_s * 1e6),
            "num_draft_tokens": num_draft_tokens,
            "draft": timeline.draft and timeline.draft.offsets_us(began_s),
            "target": timeline.target and timeline.target.offsets_us(began_s),
            "decided": round((timeline.decided_s - began_s) * 1e6),
            "committed": round((timeline.committed_s - began_s) * 1e6),
            "shown": round((timeline.shown_s - began_s) * 1e6),
        }
        self._lines.append(json.dumps(line) + "\n")
        if len(self._lines) >= _MAX_LINES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered lines to the file; lines that do not fit on the disk are lost."""
        lines = "".join(self._lines).encode()
        self._lines.clear()
        try:
            num_written = self._file.write(lines)
            if num_written < len(lines):  # remove the partial write, so that the file holds whole lines only
                self._file.truncate(self._file.tell() - num_written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._has_warned:
                _log.warning("timeline lost rounds: cannot write the file: %s", error.strerror)
            self._has_warned = True

    def close(self) -> None:
        """Write the buffered lines and close the file. Idempotent."""
        if not self._file.closed:
            self.flush()
            self._file.close()
