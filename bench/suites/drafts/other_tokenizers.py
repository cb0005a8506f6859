"""Suite `drafts`, drafts with another tokenizer, on real models: SmolLM2-135M for Gemma 3 270M, and the reverse.

Neither model exists with the other one's tokenizer, so no alpha exists to divide by; row 35 is measured on drafts
made for it (`retokenised`). Each prompt is a question as plain text. The suite is left out where the models are not
installed (`make real`).
"""

from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import interleave, median_ratio
from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.suites.real.suite import chat_prompts
from bench.systems.ours import RunningSystem, SystemRun, acceptance, emitted_per_round
from bench.systems.real_models import GEMMA3, SMOLLM2
from specdec.checkpoints.vocabulary import load_tokenizer

DRAFTED, ALONE = "other_tokenizer", "target_only"
NUM_PROMPTS, NUM_QUICK_PROMPTS = 8, 2
NUM_TOKENS, NUM_QUICK_TOKENS = 64, 16
GAMMA = 3
SAMPLING = {"greedy": {"temperature": 0.0}, "T = 1": {"temperature": 1.0, "seed": 1, "mode": "rejection"}}


def rows(suite: str, quick: bool) -> list[Row]:
    """Both directions; no rows where a model is missing."""
    try:
        models = {"SmolLM2-135M": SMOLLM2.path(), "Gemma 3 270M": GEMMA3.path()}
    except FileNotFoundError:
        return []
    names = list(models)
    return [
        row
        for target, draft in (names[::-1], names)
        for row in _pair_rows(suite, f"{draft} for {target}", models[target], models[draft], quick)
    ]


def _pair_rows(suite: str, case: str, target: Path, draft: Path, quick: bool) -> list[Row]:
    num_prompts, num_tokens = (NUM_QUICK_PROMPTS, NUM_QUICK_TOKENS) if quick else (NUM_PROMPTS, NUM_TOKENS)
    tokenizer = load_tokenizer(target)
    prompts = [tokenizer.encode(text) for text in chat_prompts()[: num_prompts + 1]]
    found: list[Row] = []
    with RunningSystem(target, draft) as drafted, RunningSystem(target, None) as alone:
        for sampling, options in SAMPLING.items():
            systems = {
                DRAFTED: partial(drafted.run, max_new_tokens=num_tokens, gamma=GAMMA, **options),
                ALONE: partial(alone.run, max_new_tokens=num_tokens, mode="off", **options),
            }
            with progress(f"{case}, {sampling}", (num_prompts + 1) * len(systems)) as advance:
                interleave(prompts[-1:], systems, advance)
                runs: dict[str, list[SystemRun]] = interleave(prompts[:-1], systems, advance)
            row = partial(Row, suite=suite, row=None, case=f"{case}, {sampling}", origin=Origin(), quick=quick)
            rates = {name: [len(run.token_ids) / run.e2el_s for run in done] for name, done in runs.items()}
            ratio = median_ratio(rates[DRAFTED], rates[ALONE])
            found.append(
                row(
                    system=DRAFTED, metric="tokens_per_s_ratio", value=ratio.median, unit="x", ratio_to=ALONE,
                    low=ratio.low, high=ratio.high, num_pairs=ratio.num_pairs,
                )
            )  # fmt: skip
            figures = {"alpha": acceptance(runs[DRAFTED]), "tau": emitted_per_round(runs[DRAFTED])}
            figures["tokens_per_s"] = float(np.median(rates[DRAFTED]))
            found += [row(system=DRAFTED, metric=metric, value=value, unit="") for metric, value in figures.items()]
    return found
