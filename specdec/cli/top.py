"""`specdec top`: a live view of a running system, read every second; one frame without a terminal.

`top_figures` reads and calculates; a frame is 80 columns wide. Metrics are read from the addresses that are given, and
from those of a `specdec up` on this machine, which its control socket names.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from specdec.cli import control
from specdec.cli.answer import Interrupts
from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.pool_tables import console_for, model_name, table_of
from specdec.cli.request_flags import add_client_flags, connect
from specdec.cli.top_figures import Figures, PoolFigures, Reader, figures_of
from specdec.contract.errors import SpecdecError, error_line
from specdec.settings.addresses import check_dialable

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


_INTERVAL_S = 1.0
_CALL_TIMEOUT_S = 5.0
_HINT = "q ends"

#: Number of rates that are kept: more than a terminal has columns.
_MOST_RATES = 600
#: Rows of the plot, and the empty row and the line with the scale above it.
_LEAST_PLOT_ROWS, _MOST_PLOT_ROWS, _PLOT_MARGIN_ROWS = 2, 8, 2


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "top", description="Show what a running system is doing, every second. q ends, and so does Ctrl-C.",
        allow_abbrev=False,
    )  # fmt: skip
    add_client_flags(parser, environ)
    parser.add_argument(
        "--metrics", action="append", default=[], type=_metrics_address, metavar="HOST:PORT",
        help="metrics address of a coordinator or replica; repeatable; default: those of the specdec up at --endpoint",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print one frame and end, as without a terminal")
    add_json_flag(parser, "a frame, and end")


def run(args: argparse.Namespace, environ: Mapping[str, str], interrupts: Interrupts) -> int:
    """Show the system; `interrupts` calls its argument on Ctrl-C.

    Raises:
        SpecdecError: the coordinator cannot be reached at first.
    """
    console = console_for(environ)
    with connect(args, timeout=_CALL_TIMEOUT_S) as client:
        reader = Reader(client, lambda: args.metrics or metrics_addresses_of(args.endpoint))
        if args.json:
            print_json(_read_once(reader).to_dict())
        elif args.once or not console.is_terminal or console.is_dumb_terminal:
            console.print(frame_of(_read_once(reader)))
        else:
            interrupted = threading.Event()
            with interrupts(lambda: _interrupt(interrupted)):
                _watch(reader, console, interrupted)
    return 0


def _interrupt(interrupted: threading.Event) -> None:
    """Raise KeyboardInterrupt, and note it: Python drops the exception where a callback of gRPC runs."""
    interrupted.set()
    raise KeyboardInterrupt


def _read_once(reader: Reader) -> Figures:
    """Return the figures of now; with metrics two readings give the rates."""
    before = reader.read()
    if not before.pages:
        return figures_of(before, before)
    time.sleep(_INTERVAL_S)
    return figures_of(before, reader.read())


def _watch(reader: Reader, console: Console, interrupted: threading.Event) -> None:
    """Show a frame every second until q. A coordinator that is gone is shown as such, and found again.

    Raises:
        KeyboardInterrupt: `interrupted` is set.
    """
    last = now = reader.read()
    rates: deque[float | None] = deque(maxlen=_MOST_RATES)
    with _key_presses() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(frame_of(figures_of(last, now), _HINT), refresh=True)
        while not _has_ended(keys):
            try:
                last, now = now, reader.read()
                note = _HINT
            except SpecdecError as error:
                note = error_line(error)
            figures = figures_of(last, now)
            rates.append(figures.tokens_per_s if note == _HINT else None)
            live.update(_with_plot(frame_of(figures, note), rates, console), refresh=True)
            if interrupted.is_set():
                raise KeyboardInterrupt


def _with_plot(frame: RenderableType, rates: Sequence[float | None], console: Console) -> RenderableType:
    """Return a frame with a plot of the tokens/s in the rows that it leaves free, if any are known and two rows fit."""
    rows = console.height - len(console.render_lines(frame)) - _PLOT_MARGIN_ROWS
    if rows < _LEAST_PLOT_ROWS or all(rate is None for rate in rates):
        return frame
    return Group(frame, Text(), plot_of(rates, console.width, min(rows, _MOST_PLOT_ROWS)))


@contextlib.contextmanager
def _key_presses() -> Iterator[int | None]:
    """Make each key readable at once, without Enter; give the descriptor, or None if no terminal is typed at."""
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _has_ended(keys: int | None) -> bool:
    """Wait for the next frame; return True at once if q is typed or the terminal has gone."""
    ends_s = time.monotonic() + _INTERVAL_S
    while (left_s := ends_s - time.monotonic()) > 0:
        if keys is None:
            time.sleep(left_s)
        elif select.select([keys], [], [], left_s)[0] and os.read(keys, 1) in (b"q", b"Q", b""):
            return True
    return False


def metrics_addresses_of(endpoint: str) -> Iterable[str]:
    """Return the metrics addresses of the `specdec up` of this user at an endpoint of this machine; () without."""
    port = control.local_port(endpoint)
    if port is None or not control.is_running(port):
        return ()
    addresses: Mapping[str, str] = {}
    with contextlib.suppress(SpecdecError):  # an older release knows no such request
        for answer in control.ask(port, {"metrics": {}}):
            addresses = answer.get("metrics", {})
    return addresses.values()


def _metrics_address(text: str) -> str:
    """Return an argument that is an address to dial. Raises ArgumentTypeError for anything else."""
    try:
        return check_dialable(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
