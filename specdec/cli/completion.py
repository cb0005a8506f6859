"""`specdec completion SHELL`: prints the script that completes commands and flags in a shell, made by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shtab

from specdec.cli.json_output import add_json_flag, print_json

_SHELLS = ("bash", "zsh", "fish")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        description="Print the script that completes specdec's commands and flags in a shell. Load it in bash with "
        "source <(specdec completion bash), in zsh after compinit with eval \"$(specdec completion zsh)\", and in fish "
        "with specdec completion fish | source",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("shell", choices=_SHELLS, help="shell that is to read the script")
    add_json_flag(parser, "the script alone")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the script for `parser`, which has all commands."""
    for action in _actions(parser):
        if action.type is Path:
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    script = shtab.complete(parser, shell=args.shell)
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        print(script)
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
