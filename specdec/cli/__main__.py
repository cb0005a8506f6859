"""Entry point of `specdec`: parses the command line, runs one subcommand, and turns errors into one line and a code.

This module alone reads the environment and installs signal handlers. A subcommand takes up to a second to import, so
only the one that runs is imported, where Ctrl-C is expected and prints no traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from specdec.cli import INTERRUPTED, Usage
from specdec.cli.command_parser import CommandParser, print_error, wants_json
from specdec.cli.extras import missing_extra
from specdec.contract.errors import Internal, InvalidRequest, SpecdecError
from specdec.contract.version import __version__

#: The subcommands, with their lines in `specdec --help`. Each is a module of this package, except `serve`.
_COMMANDS = {
    "up": "run the whole system on this machine",
    "serve": "run the whole system with this target model: up --target MODEL",
    "down": "end a running specdec up",
    "generate": "generate from a prompt",
    "chat": "talk over one session",
    "advise": "list drafts that fit a target, with memory and expected gain",
    "plan": "size a deployment: replicas, GPUs, gamma and memory for a load",
    "top": "live view of a running system: requests, pools, replicas, acceptance, queues",
    "status": "pools, replicas and sessions of a running system",
    "pools": "draft pools of a running system, by class of requests",
    "promote": "give sessions another draft pool, share by share",
    "scale": "start or drain replicas of a running specdec up",
    "drain": "take one replica out of use, and wait until no stream runs there",
    "join": "add a draft model to a running specdec up, scored before it is used",
    "distill": "train a draft on what the target said (see up --learning-log)",
    "bench": "speculation against target-only on a running system",
    "usage": "usage records of the turns, for bills: one line a turn, or sums by tenant, key or model",
    "doctor": "check the installation and a running system: what is wrong and what to do",
    "health": "ask a service for its health",
    "completion": "print the completion script of a shell",
}

#: Subcommands that need a running system and wait for one that is starting.
_NEED_A_SYSTEM = ("generate", "chat", "top", "status", "pools", "promote", "scale", "drain", "join", "bench")

#: Subcommands whose flags have no default in the environment.
_WITHOUT_ENVIRON = ("up", "completion")


def build_parser(environ: Mapping[str, str], command: str = "") -> argparse.ArgumentParser:
    """Return the parser of the command line, with the flags of one subcommand, or of all for "".

    A command whose extra is not installed has no flags then.
    Defaults come from `environ` for flags that have a variable (`SPECDEC_ENDPOINT`).
    """
    description = "Distributed speculative decoding: run it, talk to it, measure it."
    parser = CommandParser(prog="specdec", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"specdec {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        if command not in ("", name) or (not command and not _is_installed(name)):
            commands.add_parser(name, help=summary)
        else:
            _add_command(name, _Listed(commands, summary), environ)
    return parser


def _is_installed(command: str) -> bool:
    """Return whether this installation has the extra that a command needs. Raises as `missing_extra`."""
    try:
        _module(command)
    except ModuleNotFoundError as error:
        missing_extra(error, command)
        return False
    return True


class _Listed:
    """Gives the parser that a subcommand adds its line in `specdec --help`."""

    def __init__(self, commands: Any, summary: str) -> None:
        self._commands, self._summary = commands, summary

    def add_parser(self, name: str, **options: Any) -> Any:
        return self._commands.add_parser(name, **options | {"help": self._summary})


def _add_command(name: str, commands: _Listed, environ: Mapping[str, str]) -> None:
    module = _module(name)
    if name == "serve":
        module.add_serve_parser(commands)
    elif name in _WITHOUT_ENVIRON:
        module.add_parser(commands)
    else:
        module.add_parser(commands, environ)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"specdec.cli.{'up' if name == 'serve' else name}")


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command line.

    Returns:
        The exit code: 0 only on success, 2 for usage, 130 after Ctrl-C, 1 otherwise.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a model may emit what the terminal's encoding lacks
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # as arguments are read; later checks name the field
    as_json = wants_json(argv)
    try:
        return _run_command(build_parser(environ, _command_of(argv)).parse_args(argv), argv, environ)
    except SystemExit as exit_:  # help, or a usage error that has been printed
        return int(exit_.code or 0)
    except Usage as error:
        print_error(InvalidRequest(str(error)), as_json=as_json)
        return 2
    except ModuleNotFoundError as error:
        print_error(missing_extra(error, _command_of(argv)), as_json=as_json)
        return 1
    except SpecdecError as error:
        print_error(error, as_json=as_json)
        if "--verbose" in argv and not as_json:
            _print_grpc_text(error)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # then the reader has left
            with contextlib.suppress(OSError):
                _print_os_error(error, as_json=as_json)
        # Keep the interpreter's last flush quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _print_os_error(error: OSError, *, as_json: bool) -> None:
    """Print an error of the operating system, such as a full disk."""
    words = error.strerror or str(error)
    if as_json:
        print_error(Internal(words), as_json=True)
    else:
        print(f"error: {words}", file=sys.stderr)


def _command_of(argv: Sequence[str]) -> str:
    """Return the subcommand of a command line, or a name that is none: then no subcommand is imported."""
    return argv[0] if argv and argv[0] in _COMMANDS else "none"


def _run_command(args: argparse.Namespace, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    run_command: Callable[..., int] = _module(args.command).run
    if args.command in ("up", "serve"):
        return run_command(args, argv, environ, _stop_event())
    if args.command in _NEED_A_SYSTEM:
        from specdec.cli.starting import await_start

        await_start(args.endpoint)
    if args.command == "completion":
        return run_command(args, build_parser({}))  # without the environment, which may hold a key
    if args.command in ("distill", "join"):
        return run_command(args)
    if args.command in ("generate", "chat", "top"):
        return run_command(args, environ, _interrupts)
    return run_command(args, environ)


def _print_grpc_text(error: SpecdecError) -> None:
    """Print gRPC's own text about a failed call; nothing if gRPC did not make the error."""
    from specdec.client.failures import grpc_text

    if text := grpc_text(error):
        print(f"gRPC: {' '.join(text.split())}", file=sys.stderr)


def _open_closed_streams() -> None:
    """Replace standard streams that the caller has closed (`<&-`, `>&-`) by empty ones."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open until the process ends


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
    """Call `action` on Ctrl-C while the context is open, instead of raising: an exception could be lost."""
    before = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> NoReturn:
    """Run the command line of this process; the installed `specdec` script calls this."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC's core writes to stderr past Python's logging
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a background job of a script
    command = _command_of(sys.argv[1:])
    if command in ("up", "serve"):
        from specdec.cli.control_folder import mark_starting
        from specdec.settings.standard_streams import never_wait_for_readers

        never_wait_for_readers()
        mark_starting()
    if command != "none":
        with (
            contextlib.nullcontext() if is_ignored else _interrupts(lambda: os._exit(INTERRUPTED)),
            contextlib.suppress(ModuleNotFoundError),  # `run` imports it again and reports the missing extra
        ):
            _module(command)  # Ctrl-C during the import may end the process at once: nothing has begun
    sys.exit(run(sys.argv[1:], os.environ))


if __name__ == "__main__":
    main()
