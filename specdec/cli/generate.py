"""`specdec generate PROMPT`: generates one output, and streams it to the terminal or prints it as JSON.

`request_flags` has the flags that `chat` shares, `answer` reads the stream, `terminal` colours it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specdec.cli import INTERRUPTED, Usage
from specdec.cli.answer import Interrupts, read_answer
from specdec.cli.closing_line import add_verbose_flag, print_closing_line
from specdec.cli.json_output import print_json
from specdec.cli.request_flags import PATIENT_BUDGETS, add_request_flags, connect, request_options
from specdec.cli.terminal import TokenWriter, wants_colour
from specdec.client import Chunk, Client, Completion, GenerateOptions
from specdec.client.results import CANCELLED
from specdec.contract.constraint import Constraint
from specdec.contract.errors import InvalidRequest


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("generate", help="generate from a prompt", allow_abbrev=False)
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="text to continue; - or none: read it from standard input"
    )
    add_request_flags(parser, environ)
    parser.add_argument(
        "--logprobs", type=int, metavar="N",
        help="add each token's logprob and the N top ones to --json or --json-lines",
    )  # fmt: skip
    constraints = parser.add_mutually_exclusive_group()
    constraints.add_argument(
        "--json-schema", metavar="FILE", help="write JSON of the schema in FILE, whose keywords are all enforced"
    )
    constraints.add_argument(
        "--regex", metavar="PATTERN", help="write text that matches a regular expression as a whole"
    )
    constraints.add_argument("--choice", action="append", metavar="TEXT", help="write one of some texts; repeatable")
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    shapes.add_argument(
        "--json-lines", action="store_true", help="stream one JSON object per chunk, then the whole output"
    )
    add_verbose_flag(parser)
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace, environ: Mapping[str, str], interrupts: Interrupts) -> int:
    """Generate and print. Only the output goes to stdout; the legend and the closing line go to stderr.

    Returns:
        The exit code: 130 if Ctrl-C ended the output, of which the part received is shown.
    """
    prompt = _prompt(args)
    is_json = args.json or args.json_lines
    if args.logprobs is not None and not is_json:
        args.refuse("--logprobs needs --json or --json-lines")
    options = request_options(args) | GenerateOptions(logprobs=args.logprobs, provenance=not is_json)
    options["constraint"] = _constraint(args)
    with connect(args, PATIENT_BUDGETS) as client:
        write, finish = _output(args, environ, client, options)
        completion = read_answer(client, client.generate(prompt, stream=True, **options), interrupts, write)
        finish(completion)
    return INTERRUPTED if completion.finish_reason == CANCELLED else 0


def _constraint(args: argparse.Namespace) -> Constraint | None:
    """Return the constraint that the flags demand. Raises Usage if the file of `--json-schema` has no schema."""
    if args.json_schema is not None:
        return _schema_in(args.json_schema)
    if args.regex is not None:
        return Constraint.regex(args.regex)
    return Constraint.choice(args.choice) if args.choice else None


def _schema_in(path: str) -> Constraint:
    try:
        text = Path(path).read_text(encoding="utf-8")
        schema = json.loads(text)
    except OSError as error:
        raise Usage(f"--json-schema: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Usage(f"--json-schema: {path} is not JSON in UTF-8: {error}") from None
    if not isinstance(schema, dict | bool):
        kind = type(schema).__name__
        raise Usage(f"--json-schema: {path} must hold a JSON schema, which is an object, got {kind}")
    return Constraint.json_schema(text)


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt not in (None, "-"):
        return str(args.prompt)
    if args.prompt is None and sys.stdin.isatty():
        args.refuse("the following arguments are required: PROMPT, or text on standard input")
    text = sys.stdin.read()
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that are not UTF-8 were read as surrogates
        raise InvalidRequest(
            f"the text on standard input is not UTF-8: there is a byte 0x{ord(text[error.start]) & 0xFF:02x} after "
            f"{error.start} characters",
            field="prompt",
        ) from None
    return text


def _output(
    args: argparse.Namespace, environ: Mapping[str, str], client: Client, options: GenerateOptions
) -> tuple[Callable[[Chunk], None], Callable[[Completion], None]]:
    """Return the functions that show each chunk, and the whole output at its end."""
    with_details = args.logprobs is not None
    if args.json:
        return lambda chunk: None, lambda completion: print_json(completion.to_dict(with_details=with_details))
    if args.json_lines:
        return (
            lambda chunk: print_json({"event": "tokens"} | chunk.to_dict(with_details=with_details)),
            lambda completion: print_json({"event": "finished"} | completion.to_dict()),
        )
    writer = TokenWriter(sys.stdout, coloured=wants_colour(sys.stdout, environ))

    def close(completion: Completion) -> None:
        # The terminal has shown Ctrl-C as ^C in the middle of the line.
        is_in_line = completion.finish_reason == CANCELLED and sys.stdout.isatty()
        if is_in_line or not completion.text.endswith("\n"):
            print(flush=True)
        if writer.legend():
            print(writer.legend(), file=sys.stderr)
        print_closing_line(client, completion, options, verbose=args.verbose)

    return writer.write, close
