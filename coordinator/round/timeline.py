"""When what was done in a round: the coordinator's own times, and between them what its replicas say of theirs.

A replica's clock is its own: what it did is laid in the middle of the call as the coordinator saw it, as if the way
there took as long as the way back. `runner` notes, `publisher` completes, `TimelineLog` writes one JSON line a round;
`specdec timeline` makes a picture of them. Not here: what a stage is (`specdec.types.Stages`).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import InvalidRequest
from specdec.rpc.calls import WireStats
from specdec.types import Stages

#: Rounds that are kept until they are written, at most.
_MAX_LINES = 64

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CallTimeline:
    """One call, in seconds of `time.monotonic`."""

    asked_s: float
    """The round turned to it."""
    sent_s: float
    """Its frame was given to the stream; where it was asked twice, the second time."""
    heard_s: float
    """The frame of its answer had been read."""
    answered_s: float
    """The round had the answer."""
    stages: Stages | None

    def offsets_us(self, began_s: float) -> dict[str, int]:
        """Microseconds from the beginning of the round to what is known; a replica's own are called `replica_`."""
        at_s = {"asked": self.asked_s, "sent": self.sent_s, "heard": self.heard_s, "answered": self.answered_s}
        if self.stages is not None:
            way_s = max(0.0, self.heard_s - self.sent_s - self.stages.sent_s) / 2
            for name, stage_s in self.stages._asdict().items():
                at_s[f"replica_{name.removesuffix('_s')}"] = self.sent_s + way_s + stage_s
        return {name: round((at - began_s) * 1e6) for name, at in at_s.items()}


@dataclass(slots=True)
class RoundTimeline:
    """One round, in seconds of `time.monotonic`."""

    began_s: float
    drafted_s: float = 0.0
    draft: CallTimeline | None = None
    """None where no draft replica was asked, or none answered."""
    target: CallTimeline | None = None
    decided_s: float = 0.0
    committed_s: float = 0.0
    shown_s: float = 0.0

    def note_draft(self, wire: WireStats, is_answered: bool, stages: Stages | None) -> None:
        """The round has its draft; `is_answered`: from a replica, whose call was the last that `wire` counted."""
        self.drafted_s = time.monotonic()
        if is_answered:
            self.draft = CallTimeline(self.began_s, wire.sent_s, wire.heard_s, self.drafted_s, stages)

    def note_target(self, wire: WireStats, stages: Stages | None) -> None:
        """The round has its verification, whose call was the last that `wire` counted."""
        self.target = CallTimeline(self.drafted_s, wire.sent_s, wire.heard_s, time.monotonic(), stages)


class TimelineLog:
    """A file of timelines, one JSON object a line. Used from one event loop."""

    def __init__(self, path: Path) -> None:
        """Opens it, to append.

        Raises:
            InvalidRequest: it cannot be written.
        """
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise InvalidRequest(f"timeline {path}: {error.strerror}", field="timeline") from error
        self._lines: list[str] = []
        self._has_complained = False

    def write(self, session_id: str, round_id: int, num_draft_tokens: int, timeline: RoundTimeline) -> None:
        """Adds a round that has been shown; what is known by now, microseconds after its beginning."""
        began_s = timeline.began_s
        line = {
            "session_id": session_id,
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
        """What was written can be read, or is lost where there is no room for it."""
        lines = "".join(self._lines).encode()
        self._lines.clear()
        try:
            num_written = self._file.write(lines)
            if num_written < len(lines):  # no half of a line stays behind
                self._file.truncate(self._file.tell() - num_written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._has_complained:
                _log.warning("rounds are missing from the timeline: %s", error.strerror)
            self._has_complained = True

    def close(self) -> None:
        """Idempotent."""
        if not self._file.closed:
            self.flush()
            self._file.close()
