"""One frame of `specdec top`: a summary, a table of pools and one of replicas, 80 columns wide, and a plot of rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from specdec.cli.pool_tables import model_name, table_of
from specdec.cli.top_figures import Figures, PoolFigures

_POOL_COLUMNS = {
    **dict.fromkeys(("role", "pool", "model"), "left"),
    **dict.fromkeys(("up", "accepted", "gamma", "waiting", "running", "draft/s"), "right"),
}
_REPLICA_COLUMNS = {
    **dict.fromkeys(("role", "pool", "replica", "address"), "left"),
    **dict.fromkeys(("sessions", "KV used"), "right"),
}
_UNKNOWN = "-"
#: Bars of none to eight eighths of a row.
_BARS = " ▁▂▃▄▅▆▇█"


def frame_of(figures: Figures, note: str = "") -> RenderableType:
    """Return a frame. `note` comes before the tables, which may be longer than the screen; "": none."""
    info = figures.info
    lines = [f"specdec {info.version} · {model_name(info.target_model)} · context {info.max_context_tokens} tokens"]
    lines += [_requests(figures), *(line for line in (_missing(figures), note) if line)]
    return Group(
        *map(Text, lines),
        Text(),
        table_of(_POOL_COLUMNS, list(map(_pool_row, figures.pools))),
        Text(),
        table_of(_REPLICA_COLUMNS, list(_replica_rows(figures))),
    )


def plot_of(rates: Sequence[float | None], columns: int, rows: int) -> RenderableType:
    """Return a bar for each of the newest tokens/s, the newest at the right, below a line with their scale."""
    shown = [rate or 0.0 for rate in rates][-columns:]
    most = max(shown)
    eighths = [round(8 * rows * rate / most) if most else 0 for rate in shown]
    lines = [f"tokens/s in the last {len(shown)} s, up to {most:.0f}"]
    for row in reversed(range(rows)):
        lines.append("".join(_BARS[min(8, max(0, height - 8 * row))] for height in eighths).rjust(columns))
    return Group(*map(Text, lines))


def _requests(figures: Figures) -> str:
    counts = f"{_number(figures.num_running)} of {_number(figures.capacity)} requests running"
    starting = f"{_number(figures.num_admitting)} starting"
    return f"{counts}, {starting} · {_number(figures.tokens_per_s)} tokens/s · {_share(figures.acceptance)} accepted"


def _missing(figures: Figures) -> str:
    """Return why figures are missing; "" if none is."""
    if figures.unreachable:
        return f"no metrics from {', '.join(figures.unreachable)}"
    return "" if figures.num_pages else "no metrics: give each service --metrics HOST:PORT, and name the addresses here"


def _pool_row(figures: PoolFigures) -> list[str]:
    pool = figures.pool
    name = f"{pool.name} (shadow)" if pool.shadow else pool.name
    num_up = sum(not replica.draining for replica in pool.replicas)
    is_draft = pool.role == "draft"
    drafting = [_share(pool.alpha), _UNKNOWN if pool.gamma is None else f"{pool.gamma:.1f}"] if is_draft else ["", ""]
    calls = [_number(figures.num_waiting), _number(figures.num_running), _number(figures.draft_tokens_per_s)]
    return [pool.role, name, model_name(pool.model), str(num_up), *drafting, *calls]


def _replica_rows(figures: Figures) -> Iterator[list[str]]:
    for pool in (each.pool for each in figures.pools):
        for replica in pool.replicas:
            name = f"{replica.replica_id} (draining)" if replica.draining else replica.replica_id
            yield [pool.role, pool.name, name, replica.address, str(replica.num_sessions), f"{replica.kv_usage:.0%}"]


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0f}"


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0%}"
