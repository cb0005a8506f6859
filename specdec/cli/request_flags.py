"""The flags that every subcommand shares which asks a running system: its endpoint, and what a request may say.

Not here: what is done with the answer. Called by `generate`, `chat`, `bench`, `status` and `health`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from specdec.client import Budgets, GenerateOptions
from specdec.client.endpoints import DEFAULT_PORT, check_endpoint
from specdec.errors import InvalidRequest
from specdec.types import Mode

DEFAULT_ENDPOINT = f"127.0.0.1:{DEFAULT_PORT}"
#: A person at a terminal who named the wrong endpoint wants to know at once; an answer under way is worth the wait.
BUDGETS = Budgets(connect_s=1.0)
#: Of who waits for a text, and is told what for: `up` starts a lost target again.
PATIENT_BUDGETS = replace(BUDGETS, target_s=60.0)


def add_endpoint_flag(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    endpoint = environ.get("SPECDEC_ENDPOINT") or DEFAULT_ENDPOINT
    parser.add_argument(
        "--endpoint", type=address, default=endpoint, metavar="HOST:PORT",
        help=f"coordinator; default {DEFAULT_ENDPOINT}, or SPECDEC_ENDPOINT",
    )  # fmt: skip


def address(text: str) -> str:
    """An argument that names a service. Raises ArgumentTypeError for what none can be dialled at."""
    try:
        return check_endpoint(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(error.message) from None


def add_request_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Flags of every subcommand that generates. What is not given is left to the server."""
    add_endpoint_flag(parser, environ)
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default 256")
    parser.add_argument("--temperature", type=float, metavar="T", help="default 1.0; 0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="(0, 1]")
    parser.add_argument("--top-k", type=int, metavar="K", help="0: off")
    parser.add_argument("--min-p", type=float, metavar="P", help="[0, 1); 0: off")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="ends the output before it; may be repeated")
    parser.add_argument("--seed", type=int, metavar="SEED", help="default: drawn by the server")
    parser.add_argument("--gamma", type=int, metavar="G", help="draft tokens a round; default: the server's choice")
    parser.add_argument("--mode", choices=[mode.name.lower() for mode in Mode], help="default: rejection")
    parser.add_argument("--draft-pool", metavar="POOL", help="who drafts (specdec pools); default: the server chooses")
    parser.add_argument("--task", metavar="LABEL", help="what kind of request it is, for --route auto")


def request_options(args: argparse.Namespace) -> GenerateOptions:
    """The shared flags as options of the SDK."""
    return GenerateOptions(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        stop=args.stop,
        seed=args.seed,
        gamma=args.gamma,
        mode=args.mode,
        draft_pool=args.draft_pool,
        task=args.task,
    )
