"""Suite `drafts`: what each kind of draft gains. Rows 30 and 31 cover repeating text, drafted without a model.

A request of the kind that edits or quotes: its prompt holds a file's beginning, what the target made of it, and the
beginning again, as an edited copy would. The target is `deep(18, 0.02)`, greedy, one stream; ours finds its drafts in
the text (`suffix`), the peer is Hugging Face's prompt lookup on the same prompts. Every prompt is new to every system:
`suffix` finds its drafts in the prompt or in the answers to other prompts. Early exit: `local`; heads:
`heads`; drafts with another tokenizer: `retokenised` (row 35), `other_tokenizers`; rows 36 and 37:
`routes`; row 38: `learning`. Draft models with the target's own vocabulary are measured by `latency`.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.harness.pairs import interleave
from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.harness.workload import NUM_NEW_TOKENS, NUM_THREADS, prompt_token_ids
from bench.suites.drafts import heads, learning, local, other_tokenizers, retokenised, routes
from bench.suites.drafts.rows import same_text_row, speed_rows
from bench.systems.models import DEMO, deep
from bench.systems.ours import RunningSystem, SystemRun
from bench.systems.transformers import PeerProcess, PeerRun

SUITE = "drafts"
CASE = "deep(18, 0.02), text that repeats"
SUFFIX, NGRAM, TARGET_ONLY, LOOKUP = "suffix", "ngram", "target_only", "hf_prompt_lookup"
NUM_QUICK_PROMPTS = 3
KINDS = ["text", "early_exit", "eagle3", "retokenised", "other_tokenizers", "routes", "learning"]
#: The value in Transformers' documentation.
LOOKUP_TOKENS = 10

Runs = dict[str, list[SystemRun] | list[PeerRun]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the choice of drafts."""
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="only these kinds of drafts")


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; prints nothing but progress."""
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        target_dir = deep(DEMO / "target", Path(folder) / "target", num_layers=18, eps=0.02)
        measure_of: dict[str, Callable[[bool], list[Row]]] = {
            "text": partial(_measure_text, target_dir),
            "early_exit": partial(local.measure, Path(folder), target_dir),
            "eagle3": partial(heads.measure, target_dir),
            "retokenised": partial(retokenised.rows, SUITE),
            "other_tokenizers": partial(other_tokenizers.rows, SUITE),
            "routes": partial(routes.rows, SUITE),
            "learning": partial(learning.rows, SUITE),
        }
        return [row for kind in KINDS if kind in arguments.kinds for row in measure_of[kind](arguments.quick)]


def _measure_text(target_dir: Path, quick: bool) -> list[Row]:
    """Rows 30 and 31."""
    starts = prompt_token_ids(target_dir)
    starts = starts[: NUM_QUICK_PROMPTS + 2] if quick else starts
    with (
        RunningSystem(target_dir, None, lookup=(SUFFIX,)) as suffix,
        RunningSystem(target_dir, None, lookup=(NGRAM,)) as ngram,
        RunningSystem(target_dir, None) as alone,
        PeerProcess(target_dir, None, NUM_THREADS) as peer,
    ):
        options = {"max_new_tokens": NUM_NEW_TOKENS, "temperature": 0.0}
        systems: dict[str, Callable] = {
            SUFFIX: partial(suffix.run, **options),
            NGRAM: partial(ngram.run, **options),
            TARGET_ONLY: partial(alone.run, mode="off", **options),
            LOOKUP: lambda prompt: peer.run("prompt_lookup", prompt, NUM_NEW_TOKENS, LOOKUP_TOKENS),
        }
        with progress("text that repeats", len(starts) * (1 + len(systems))) as advance:
            prompts = []
            for start in starts:
                # The peer generates it, so that none of our systems has it in a cache or a history.
                answer = peer.run("plain", start, NUM_NEW_TOKENS, LOOKUP_TOKENS).token_ids
                prompts.append([*start, *answer, *start[1:]])
                advance()
            interleave(prompts[:2], systems, advance)
            runs = interleave(prompts[2:], systems, advance)
    return _rows(runs, quick)


def _rows(runs: Runs, quick: bool) -> list[Row]:
    row = partial(Row, suite=SUITE, case=CASE, origin=Origin(), quick=quick)
    comparisons = ((30, SUFFIX, TARGET_ONLY, 2.0), (31, SUFFIX, LOOKUP, 1.5), (None, NGRAM, TARGET_ONLY, None),
                   (None, NGRAM, LOOKUP, None))  # fmt: skip
    return [*speed_rows(runs, row, comparisons, (SUFFIX, NGRAM)), same_text_row(runs, row, SUFFIX, TARGET_ONLY)]
