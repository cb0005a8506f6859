"""`specdec top`: a live view of a running system, read every second; one frame without a terminal.

`top_figures` reads and calculates, `top_view` lays out. Metrics are read from the addresses that are given, and from
those of a `specdec up` on this machine, which its control socket names.
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
from specdec.cli.pool_tables import console_for
from specdec.cli.request_flags import add_client_flags, connect
from specdec.cli.top_figures import Figures, Reader, figures_of
from specdec.cli.top_view import frame_of, plot_of
from specdec.contract.errors import SpecdecError, error_line
from specdec.settings.addresses import check_dialable

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
