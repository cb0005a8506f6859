"""What the cold tier counts; read when metrics are scraped. Counted in several threads, each its own numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class KvTally:
    """Counts from 0."""

    choices: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("restore", "replay", "missing", "unavailable", "late"), 0)
    )
    """Calls that lacked at least one whole run, by what became of that."""
    num_restored: int = 0
    """Runs copied into KV blocks."""
    num_damaged: int = 0
    """Values that were not what their key says."""
    num_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("read", "written"), 0))
    dropped: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("queue_full", "evicted", "refused", "unavailable"), 0)
    )
    """Runs that were offered and not written, by reason."""
    replay_s_per_run: float = 0.0
    """What computing a run takes, as estimated last; 0 before that."""
