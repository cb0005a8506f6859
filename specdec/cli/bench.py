"""`specdec bench`: measures what speculation gives on a running system, with its own models and your own prompts.

Every prompt runs with speculation and target-only, in turns, so that drift of the machine affects both alike, and
greedily unless a flag says otherwise, so that both make the same text. The speedup is the median of the pairs' ratios.
A round emits several tokens but takes longer than a step of the target alone: the speedup is the tokens of a round over
its duration in steps. The suites of the repository are `python -m bench`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.request_flags import add_request_flags, connect, request_options
from specdec.client import Client, Completion, GenerateOptions
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import TokenSource

#: Speedup from which speculation counts as a gain; below it, machine noise may explain the difference.
GAIN = 1.05


def tokens_per_round(completions: Sequence[Completion]) -> float:
    """Return the mean number of tokens that a round emitted; 0 without any round."""
    num_tokens = sum(completion.usage.num_output_tokens for completion in completions)
    return num_tokens / max(1, sum(completion.stats.num_rounds for completion in completions))


def acceptance(completions: Sequence[Completion]) -> float | None:
    """Return the share of draft tokens that the target accepted; None without any draft token."""
    num_draft_tokens = sum(completion.stats.num_draft_tokens for completion in completions)
    if not num_draft_tokens:
        return None
    return sum(completion.stats.num_accepted_tokens for completion in completions) / num_draft_tokens


def round_ms(completions: Sequence[Completion]) -> float:
    """Return the median duration of a round after the first token, in milliseconds; 0 if no output has two rounds."""
    durations = [
        (one.stats.e2el_s - one.stats.ttft_s) / (one.stats.num_rounds - 1)
        for one in completions
        if one.stats.num_rounds > 1
    ]
    return 1e3 * statistics.median(durations) if durations else 0.0


def reason_for(speedup: float, speculative: Sequence[Completion], target_only: Sequence[Completion]) -> str:
    """Return the sentence that explains a speedup."""
    accepted = acceptance(speculative)
    if accepted is None:
        return "no gain: no draft token was proposed, because drafting did not pay before or no draft was found"
    with_ms, alone_ms = round_ms(speculative), round_ms(target_only)
    cost = f"{with_ms / alone_ms:.1f} steps of the target alone" if alone_ms else f"{with_ms:.1f} ms"
    verdict = "gain" if speedup >= GAIN else "no gain"
    return (
        f"{verdict}: a round emits {tokens_per_round(speculative):.1f} tokens ({accepted:.0%} of the draft tokens are "
        f"kept) and takes as long as {cost}"
    )


_PROMPTS = (
    "Explain in three sentences how a suspension bridge carries its load.",
    "def read_lines(path):",
    "The five largest lakes of the world, with their areas:\n1.",
)
_SHOWN_CHARACTERS = 60
_WARM_UP_TOKENS = 16
_SPECULATIVE, _TARGET_ONLY = "speculative", "target-only"


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "bench", description="Measure speculation against target-only on a running system.", allow_abbrev=False
    )
    add_request_flags(parser, environ, temperature=0.0)
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="file with one prompt per line; default: code, prose and a list"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="number of runs of each prompt; default 3")
    add_json_flag(parser, "a table")
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Measure and print.

    Raises:
        InvalidRequest: the file of prompts is empty or cannot be read.
        SpecdecError: the system refused a request.
    """
    if args.repeats < 1:
        args.refuse("--repeats must be at least 1")
    if args.mode == "off" or args.gamma == 0:
        flag = "--mode off" if args.mode == "off" else "--gamma 0"
        args.refuse(f"{flag} is target-only: there is nothing to compare")
    prompts = _prompts(args.prompts) * args.repeats
    options = request_options(args) | GenerateOptions(provenance=True)
    modes: dict[str, GenerateOptions] = {_SPECULATIVE: options, _TARGET_ONLY: {**options, "mode": "off"}}
    done: dict[str, list[Completion]] = {name: [] for name in modes}
    with connect(args) as client, _Bar(len(prompts)) as bar:
        for mode in modes.values():  # the first pass of a process is slower; neither side is to pay for it
            _complete(client, prompts[0], mode | GenerateOptions(max_new_tokens=_WARM_UP_TOKENS))
        for index, prompt in enumerate(prompts):
            for name in list(modes)[:: 1 if index % 2 == 0 else -1]:
                done[name].append(_complete(client, prompt, modes[name]))
            bar.advance()
    _print_results(prompts, done, as_json=args.json)
    return 0


def _complete(client: Client, prompt: str, options: GenerateOptions) -> Completion:
    """Return one output. Its session is deleted."""
    completion = client.generate(prompt, **options)
    client.delete_session(completion.session_id)
    return completion


def _print_results(prompts: Sequence[str], done: Mapping[str, Sequence[Completion]], *, as_json: bool) -> None:
    stats = {name: _stats(completions) for name, completions in done.items()}
    rates = {name: [_decode_rate(completion) for completion in completions] for name, completions in done.items()}
    pairs = zip(prompts, rates[_SPECULATIVE], rates[_TARGET_ONLY], strict=True)
    measured = [(prompt, with_drafts / alone) for prompt, with_drafts, alone in pairs if alone]
    ratios = [ratio for _, ratio in measured]
    speedup = statistics.median(ratios) if ratios else 0.0
    by_prompt = {
        prompt: statistics.median(ratio for other, ratio in measured if other == prompt) for prompt in dict(measured)
    }
    reason = reason_for(speedup, done[_SPECULATIVE], done[_TARGET_ONLY])
    kept = _kept_by_pool(done[_SPECULATIVE])
    if as_json:
        print_json(
            {"speedup": speedup, "num_pairs": len(ratios), "reason": reason, "kept_draft_tokens": kept}
            | {"by_prompt": by_prompt, **stats}
        )
        return
    for name, values in stats.items():
        print(f"{name:12}", *(f"{value:10.4g} {key}" for key, value in values.items()))
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
    print(f"speedup {speedup:.2f}{spread}, median of {len(ratios)} pairs")
    print(reason)
    if kept:
        print("draft tokens kept:", ", ".join(f"{count} of {pool}" for pool, count in kept.items()))
    for prompt, ratio in by_prompt.items():
        print(f"{ratio:7.2f}  {_shortened(prompt)}")


class _Bar:
    """Shows how many pairs are done: a bar in a terminal, elsewhere a line per pair."""

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
    """Return the tokens per second after the first ones; 0 for an output of one chunk."""
    stats = completion.stats
    seconds = stats.e2el_s - stats.ttft_s
    return (completion.usage.num_output_tokens - 1) / seconds if seconds > 0 else 0.0


def _kept_by_pool(completions: Sequence[Completion]) -> dict[str, int]:
    """Return the number of draft tokens that the target kept, by the pool that drafted them, the largest first."""
    details = (detail for completion in completions for detail in completion.details)
    kept = Counter(detail.draft_pool for detail in details if detail.source is TokenSource.ACCEPTED)
    return dict(kept.most_common())


def _shortened(prompt: str) -> str:
    """Return the beginning of a prompt on one line."""
    line = " ".join(prompt.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 2] + " …"


def _stats(completions: Sequence[Completion]) -> dict[str, float]:
    stats = [completion.stats for completion in completions]
    num_tokens = sum(completion.usage.num_output_tokens for completion in completions)
    return {
        "tokens_per_s": statistics.median(map(_decode_rate, completions)),
        "ttft_ms": statistics.median(one.ttft_s for one in stats) * 1e3,
        "tokens_per_round": tokens_per_round(completions),
        "acceptance": acceptance(completions) or 0.0,
        "wire_bytes_per_token": sum(one.wire_bytes for one in stats) / max(1, num_tokens),
    }
