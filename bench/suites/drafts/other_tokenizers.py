"""Suite `drafts`, drafts with another tokenizer, on real models: SmolLM2-135M for Gemma 3 270M, and the reverse.

Neither model exists with the other one's tokenizer, so no alpha exists to divide by; row 35 is measured on drafts
made for it (`retokenised`). Each prompt is a question as plain text. The suite is left out where the models are not
installed (`make real`).
"""

from functools import partial
from pathlib import Path

from bench.harness.pairs import rate_rows, ratio_row, take_turns
from bench.harness.rows import Origin, Row
from bench.harness.workload import chat_prompts
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
                ALONE: partial(alone.run, max_new_tokens=num_tokens, **(options | {"mode": "off"})),
            }
            runs: dict[str, list[SystemRun]] = take_turns(f"{case}, {sampling}", systems, prompts[:-1], prompts[-1:])
            row = partial(Row, suite=suite, case=f"{case}, {sampling}", origin=Origin(), quick=quick)
            rates = {name: [len(run.token_ids) / run.e2el_s for run in done] for name, done in runs.items()}
            found.append(ratio_row(row, rates, DRAFTED, ALONE))
            figures = {"alpha": acceptance(runs[DRAFTED]), "tau": emitted_per_round(runs[DRAFTED])}
            found += [row(system=DRAFTED, metric=metric, value=value, unit="") for metric, value in figures.items()]
            found += rate_rows(row, rates)
    return found
