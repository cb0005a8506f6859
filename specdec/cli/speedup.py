"""Says in one line why speculation gains or does not, from completions with and without it.

With speculation a round emits several tokens but takes longer than a step of the target alone. The speedup is the
tokens per round over the duration of a round in steps. `specdec bench` and `examples/demo.py` print the line.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from specdec.client import Completion

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
