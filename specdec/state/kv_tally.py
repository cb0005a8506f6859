"""Counts of the cold tier, read when metrics are scraped. Several threads count, each in fields of its own."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class KvTally:
    """The counts, which start at 0."""

    choices: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("restore", "replay", "missing", "unavailable", "late"), 0)
    )
    """Calls that lacked at least one whole run, by how that was resolved."""
    num_restored: int = 0
    """Runs copied into KV blocks."""
    num_damaged: int = 0
    """Values that did not match their key."""
    num_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("read", "written"), 0))
    dropped: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("queue_full", "evicted", "refused", "unavailable"), 0)
    )
    """Runs that were offered and not written, by reason."""
    replay_s_per_run: float = 0.0
    """Latest estimate of the time to compute a run; 0 before the first."""
