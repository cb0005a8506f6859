"""`specdec generate PROMPT`: one output, streamed to the terminal or printed as one JSON object.

Not here: colours (`terminal`), retries (the SDK). The flags shared with `chat` live here too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from specdec.cli.terminal import TokenWriter, closing_line, wants_colour
from specdec.client import Budgets, Client, GenerateOptions
from specdec.types import Mode

DEFAULT_ENDPOINT = "127.0.0.1:50051"
#: A person at a terminal who named the wrong endpoint wants to know at once; an answer under way is worth the wait.
BUDGETS = Budgets(connect_s=1.0)


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser("generate", help="generate from a prompt", allow_abbrev=False)
    parser.add_argument("prompt", metavar="PROMPT")
    add_request_flags(parser, environ)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")


def add_request_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Flags of every subcommand that generates. What is not given is left to the server."""
    endpoint = environ.get("SPECDEC_ENDPOINT") or DEFAULT_ENDPOINT
    parser.add_argument("--endpoint", default=endpoint, metavar="HOST:PORT", help="coordinator (SPECDEC_ENDPOINT)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default 256")
    parser.add_argument("--temperature", type=float, metavar="T", help="default 1.0; 0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="(0, 1]")
    parser.add_argument("--top-k", type=int, metavar="K", help="0: off")
    parser.add_argument("--seed", type=int, metavar="SEED", help="default: drawn by the server")
    parser.add_argument("--gamma", type=int, metavar="G", help="draft tokens a round; default: the server's choice")
    parser.add_argument("--mode", choices=[mode.name.lower() for mode in Mode], help="default: rejection")


def request_options(args: argparse.Namespace) -> GenerateOptions:
    """The shared flags as options of the SDK."""
    return GenerateOptions(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        gamma=args.gamma,
        mode=args.mode,
    )


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Text goes to stdout and nothing else does; legend and closing line go to stderr."""
    with Client(args.endpoint, budgets=BUDGETS) as client:
        if args.json:
            completion = client.generate(args.prompt, **request_options(args))
            print(json.dumps(completion.to_dict(), ensure_ascii=False))
            return 0
        writer = TokenWriter(sys.stdout, coloured=wants_colour(sys.stdout, environ))
        options = request_options(args) | GenerateOptions(provenance=True)
        with client.generate(args.prompt, stream=True, **options) as stream:
            for chunk in stream:
                writer.write(chunk)
            completion = stream.result()
    if not completion.text.endswith("\n"):
        print(flush=True)
    if writer.legend():
        print(writer.legend(), file=sys.stderr)
    print(closing_line(completion), file=sys.stderr)
    return 0
