"""`specdec bench`: what speculation gives on a running system, with its own models and your own prompts.

Every prompt runs with speculation and target-only, by turns, so that the machine's drift hits both alike; the speedup
is the median of the pairs' ratios. Not here: peers, and the suites of the repository (`python -m bench`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specdec.cli.request_flags import BUDGETS, add_request_flags, request_options
from specdec.client import Client, Completion, GenerateOptions
from specdec.errors import InvalidRequest

_PROMPTS = (
    "Explain in three sentences how a suspension bridge carries its load.",
    "def read_config(path):\n    ",
    "The five largest lakes of the world, with their areas:\n1.",
)
_SPECULATIVE, _TARGET_ONLY = "speculative", "target-only"


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "bench", help="speculation against target-only on a running system", allow_abbrev=False
    )
    add_request_flags(parser, environ)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line; default: three of our own")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="times each prompt is run; default 3")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Measures and prints.

    Raises:
        InvalidRequest: no prompt, or none that can be read.
        SpecdecError: the system refused a request.
    """
    if args.repeats < 1:
        args.refuse("--repeats must be at least 1")
    if args.mode == "off" or args.gamma == 0:
        flag = "--mode off" if args.mode == "off" else "--gamma 0"
        args.refuse(f"{flag}: there is nothing to compare target-only with")
    prompts = _prompts(args.prompts) * args.repeats
    options = request_options(args)
    modes: dict[str, GenerateOptions] = {_SPECULATIVE: options, _TARGET_ONLY: {**options, "mode": "off"}}
    done: dict[str, list[Completion]] = {name: [] for name in modes}
    with Client(args.endpoint, budgets=BUDGETS) as client, _Bar(len(prompts)) as bar:
        for index, prompt in enumerate(prompts):
            for name in list(modes)[:: 1 if index % 2 == 0 else -1]:
                completion = client.generate(prompt, **modes[name])
                client.delete_session(completion.session_id)
                done[name].append(completion)
            bar.advance()
    figures = {name: _figures(completions) for name, completions in done.items()}
    rates = {name: [_decode_rate(completion) for completion in completions] for name, completions in done.items()}
    ratios = [ours / other for ours, other in zip(rates[_SPECULATIVE], rates[_TARGET_ONLY], strict=True) if other]
    speedup = statistics.median(ratios) if ratios else 0.0
    if args.json:
        print(json.dumps({"speedup": speedup, "num_pairs": len(ratios), **figures}))
        return 0
    for name, values in figures.items():
        print(f"{name:12}", *(f"{value:10.4g} {key}" for key, value in values.items()))
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
    print(f"speedup {speedup:.2f}{spread}, median of {len(ratios)} pairs")
    return 0


class _Bar:
    """Pairs done: a bar in a terminal, elsewhere a line each."""

    def __init__(self, num_pairs: int) -> None:
        self._num_pairs = num_pairs
        self._num_done = 0
        columns = (TextColumn("{task.completed} of {task.total} pairs"), BarColumn(), TimeRemainingColumn())
        is_hidden = not sys.stderr.isatty()
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=is_hidden)
        self._task = self._progress.add_task("", total=num_pairs)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self) -> None:
        self._num_done += 1
        self._progress.advance(self._task)
        if self._progress.disable:
            print(f"{self._num_done} of {self._num_pairs} pairs", file=sys.stderr, flush=True)


def _prompts(path: Path | None) -> list[str]:
    if path is None:
        return list(_PROMPTS)
    try:
        prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"--prompts: cannot read {path}: {error}", field="prompts") from error
    if not prompts:
        raise InvalidRequest(f"--prompts: {path} holds no prompt", field="prompts")
    return prompts


def _decode_rate(completion: Completion) -> float:
    """Tokens a second after the first ones; 0 for an output of one chunk."""
    stats = completion.stats
    seconds = stats.e2el_s - stats.ttft_s
    return (completion.usage.num_output_tokens - 1) / seconds if seconds > 0 else 0.0


def _figures(completions: Sequence[Completion]) -> dict[str, float]:
    stats = [completion.stats for completion in completions]
    num_tokens = sum(completion.usage.num_output_tokens for completion in completions)
    return {
        "tokens_per_s": statistics.median(map(_decode_rate, completions)),
        "ttft_ms": statistics.median(one.ttft_s for one in stats) * 1e3,
        "tau": num_tokens / max(1, sum(one.num_rounds for one in stats)),
        "draft_efficiency": sum(one.num_accepted_tokens for one in stats)
        / max(1, sum(one.num_draft_tokens for one in stats)),
        "wire_bytes_per_token": sum(one.wire_bytes for one in stats) / max(1, num_tokens),
    }
