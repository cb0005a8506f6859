"""The line on stderr that sums up an answer: tokens and seconds, how often the draft was right, tokens a step.

`generate`, `chat` and the examples print it. A step is one call of the target, which proto and statistics name a round.
"""

from __future__ import annotations

import argparse
import sys

from specdec.cli.draft_pools import ONLY_POOL
from specdec.client import Client, Completion, GenerateOptions
from specdec.client.results import CANCELLED
from specdec.contract.errors import SpecdecError
from specdec.contract.types import TokenSource

#: Mean number of draft tokens per step below which the server is taken to have paused drafting.
_PAUSED_GAMMA = 0.5


def add_verbose_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verbose", action="store_true",
        help="end the closing line with its figures under their usual names: steps, alpha, tau, tokens/s; after an "
        "error that gRPC made, print its text",
    )  # fmt: skip


def print_closing_line(client: Client, completion: Completion, options: GenerateOptions, *, verbose: bool) -> None:
    """Print the closing line of an answer that was requested with `options`, on stderr."""
    drafting = _describe_missing_drafts(client, completion, options)
    print(closing_line(completion, drafting=drafting, verbose=verbose), file=sys.stderr)


def closing_line(completion: Completion, *, drafting: str = "", verbose: bool = False) -> str:
    """Return the closing line of an output that was requested with provenance.

    Args:
        completion: the output. One whose stream was closed early has no times and no number of steps.
        drafting: the reason why steps had no draft, or "".
        verbose: True appends the figures under the names that the field gives them.
    """
    num_tokens, num_steps = len(completion.token_ids), completion.stats.num_rounds
    counted = f"{num_tokens} token{'' if num_tokens == 1 else 's'}"
    is_cancelled = completion.finish_reason == CANCELLED
    parts = [f"stopped after {counted}" if is_cancelled else f"{counted} in {_seconds(completion.stats.e2el_s)}"]
    if num_tested := _num_tested(completion):
        parts.append(f"{_drafts(completion)} right {100 * _num_accepted(completion) / num_tested:.0f} % of the time")
    if num_steps and num_tested:
        parts.append(f"{num_tokens / num_steps:.1f} tokens a step")
    if drafting:
        parts.append(drafting)
    if completion.target_changed:
        parts.append("another target model than in the previous turn")
    if verbose:
        parts.append(_figures(completion))
    return " · ".join(parts)


def tokens_per_s(completion: Completion) -> float:
    """Return output tokens divided by the server's end-to-end time; 0 for an empty output."""
    e2el_s = completion.stats.e2el_s
    return completion.usage.num_output_tokens / e2el_s if e2el_s > 0 else 0.0


def _describe_missing_drafts(client: Client, completion: Completion, options: GenerateOptions) -> str:
    """Return why half or more of the steps had no draft, as far as it is known; "" if fewer had none."""
    if options.get("mode") == "off" or options.get("gamma") == 0:
        return "no drafts, as requested"
    num_steps, has_tested = completion.stats.num_rounds, _num_tested(completion) > 0
    num_without = completion.stats.num_target_only_steps if has_tested else num_steps
    if not num_steps or 2 * num_without < num_steps:
        return ""
    try:
        pools = [pool for pool in client.info().pools if pool.role == "draft"]
    except SpecdecError:
        return ""
    if not pools:
        return "no drafts: the system has no draft pool"
    where = f" in {num_without} of {num_steps} steps" if has_tested else ""
    # With several pools it is unknown which one the server decided by.
    if len(pools) == 1 and pools[0].gamma is not None and pools[0].gamma < _PAUSED_GAMMA:
        return f"drafting paused{where}: it gives no speedup here"
    return f"no draft{where}"


def _drafts(completion: Completion) -> str:
    """Return the names of the pools that drafted; just "draft" for the pool of a lone draft model, which has none."""
    pools = {detail.draft_pool for detail in completion.details} - {""}
    return " and ".join(sorted(pools)) if pools - {ONLY_POOL} else "draft"


def _num_tested(completion: Completion) -> int:
    # A step tests draft tokens up to and including its first rejection.
    return sum(detail.source in (TokenSource.ACCEPTED, TokenSource.CORRECTED) for detail in completion.details)


def _num_accepted(completion: Completion) -> int:
    return sum(detail.source is TokenSource.ACCEPTED for detail in completion.details)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10.0 else f"{seconds:.1f} s"


def _figures(completion: Completion) -> str:
    num_tested, num_steps = _num_tested(completion), completion.stats.num_rounds
    alpha = f"{_num_accepted(completion) / num_tested:.2f}" if num_tested else "n/a"
    tau = f"{len(completion.token_ids) / num_steps:.2f}" if num_steps else "n/a"
    return f"steps {num_steps}, alpha {alpha}, tau {tau}, {tokens_per_s(completion):.1f} tokens/s"
