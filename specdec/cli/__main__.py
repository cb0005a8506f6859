"""Entry point of `specdec`: parses, runs one subcommand, turns errors into one line and an exit code.

Not here: what subcommands do. This module alone reads the environment and installs signal handlers. Subcommands take
half a second to import, and a Ctrl-C within it is no traceback: they are imported late, where one is awaited.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import specdec
from specdec.cli import INTERRUPTED
from specdec.errors import InvalidRequest, SpecdecError


class _Parser(argparse.ArgumentParser):
    """A parser whose usage errors are one line in the form of every other error, and name the subcommand's help."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """As its base class does, but a subcommand refuses itself what it does not know."""
        parsed, unknown = super().parse_known_args(*args, **kwargs)
        if unknown and self._subparsers is None:
            self.error(self._unknown_words(unknown))
        return parsed, unknown

    def _unknown_words(self, unknown: Sequence[str]) -> str:
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
        if not flag:
            return f"unrecognized arguments: {' '.join(unknown)}"
        alike = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        return f"unrecognized argument {flag}" + (f": did you mean {alike[0]}?" if alike else "")

    def error(self, message: str) -> NoReturn:
        print(f"error: INVALID_ARGUMENT INVALID_REQUEST: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def build_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The whole command line. Defaults come from `environ` where a flag has a variable (`SPECDEC_ENDPOINT`)."""
    from specdec.cli import bench, chat, distill, generate, health, join, pools, promote, scale, status, timeline, up

    description = "Distributed speculative decoding: run it, talk to it, measure it."
    parser = _Parser(prog="specdec", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"specdec {specdec.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    up.add_parser(commands)
    generate.add_parser(commands, environ)
    chat.add_parser(commands, environ)
    status.add_parser(commands, environ)
    pools.add_parser(commands, environ)
    promote.add_parser(commands, environ)
    scale.add_parser(commands, environ)
    join.add_parser(commands, environ)
    distill.add_parser(commands, environ)
    timeline.add_parser(commands)
    bench.add_parser(commands, environ)
    health.add_parser(commands)
    return parser


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs one command line.

    Returns:
        The exit code: 0 only on success, 2 for usage, 130 after Ctrl-C, 1 otherwise.
    """
    from specdec.cli import bench, chat, distill, generate, health, join, pools, promote, scale, status, timeline, up
    from specdec.cli.terminal import error_line

    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a model may emit what the terminal's encoding lacks
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # as arguments are read: refused by name later, not here
    try:
        args = build_parser(environ).parse_args(argv)
        if args.command == "up":
            return up.run(args, environ, _stop_event())
        if args.command in ("distill", "join"):
            return {"distill": distill.run, "join": join.run}[args.command](args)
        if args.command in ("generate", "chat"):
            talk = {"generate": generate.run, "chat": chat.run}
            return talk[args.command](args, environ, _interrupts)
        commands = {
            "status": status.run,
            "pools": pools.run,
            "promote": promote.run,
            "scale": scale.run,
            "timeline": timeline.run,
            "bench": bench.run,
            "health": health.run,
        }
        return commands[args.command](args, environ)
    except SystemExit as exit_:  # help, or a usage error that has been told
        return int(exit_.code or 0)
    except up.Usage as error:
        print(f"error: {InvalidRequest.code} {InvalidRequest.default_reason}: {error}", file=sys.stderr)
        return 2
    except up.ChildFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except SpecdecError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # whose reader has left: nothing can be said to it
            with contextlib.suppress(OSError):
                print(f"error: {error.strerror or error}", file=sys.stderr)
        # Keep the interpreter's last flush quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _open_what_is_closed() -> None:
    """Streams that whoever started us has closed (`<&-`, `>&-`): empty, or to nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # as long as we run


def _stop_event() -> threading.Event:
    stop = threading.Event()
    stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # `nohup specdec up` outlives its terminal
        stops.remove(signal.SIGHUP)
    for number in stops:
        signal.signal(number, lambda *_: stop.set())
    return stop


@contextlib.contextmanager
def _interrupts(action: Callable[[], None]) -> Iterator[None]:
    """Within, Ctrl-C calls `action` and raises nothing: what it raises wherever the thread is may be lost there."""
    before = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> NoReturn:
    """What the installed `specdec` script calls."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC's core writes to stderr past Python's logging
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # of a job in the background of a script
    with contextlib.nullcontext() if is_ignored else _interrupts(lambda: os._exit(INTERRUPTED)):
        build_parser(os.environ)  # imports them all; nothing that would have to be put in order has begun
    sys.exit(run(sys.argv[1:], os.environ))


if __name__ == "__main__":
    main()
