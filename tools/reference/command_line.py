"""The command line page: every subcommand of `specdec` with its arguments, from the parser itself."""

from __future__ import annotations

import argparse

from specdec.cli.__main__ import build_parser
from tools.reference.markdown import code, document, item, items, paragraph

_INTRODUCTION = """An error is one line on the standard error stream, `error: message (REASON)`; with `--json` or
`--json-lines` it is one JSON object with `error`, `code`, `reason` and `field`. The exit code is 0 only on success, 2
for a usage error, 130 after Ctrl-C and 1 otherwise. Output has no colour without a terminal or with `NO_COLOR`. The
flags of the service programs are on the [configuration](configuration.md) page."""


def page() -> str:
    """Return the page as it should be."""
    parser = build_parser({})
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    summaries = {action.dest: action.help or "" for action in commands._choices_actions}
    blocks = [paragraph(_INTRODUCTION)]
    for name, command in commands.choices.items():
        if name not in summaries:  # an alias
            continue
        blocks += [f"## specdec {name}", paragraph(_capitalised(summaries[name]))]
        shown = [action for action in command._actions if action.help != argparse.SUPPRESS]
        if name == "serve":
            blocks.append(paragraph("It has all flags of `specdec up` except `--target`."))
            shown = [action for action in shown if not action.option_strings]
        blocks.append(items([_argument(action) for action in shown if action.dest != "help"]))
    return document("Command line", *blocks)


def _argument(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else _value(action)
    names = action.option_strings or [value]
    heads = [f"{name} {value}".strip() if action.option_strings else name for name in names]
    return item(", ".join(map(code, heads)), _capitalised(_help(action)))


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "|".join(map(str, action.choices))
    return action.dest.upper()


def _help(action: argparse.Action) -> str:
    text = (action.help or "") % {**vars(action), "prog": "specdec"}
    has_default = action.default not in (None, argparse.SUPPRESS, "", (), False) and action.nargs != 0
    if has_default and "default" not in text.lower() and isinstance(action.default, (str, int, float)):
        text = f"{text}; default {action.default}" if text else f"default {action.default}"
    return text


def _capitalised(text: str) -> str:
    first = text.split(" ", 1)[0]
    is_word = first == "default:" or (first.isalpha() and first.islower())
    return text[:1].upper() + text[1:] if is_word else text
