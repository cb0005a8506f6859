"""Row 32 of suite `drafts`: an EAGLE-3 head in the target against a separate draft model, greedy, one stream.

The target is `deep(18, 0.02)` and the head is the demo target's (`models/demo/eagle3`), unchanged: it reads the hidden
states 2, 4 and 6, which the deep target has too, since its first six layers are the demo target's. The draft model is
the demo draft, in a service of its own. Both choose gamma by themselves. Not here: early exit (`local_drafts`). Called
by `drafts`.
"""

from functools import partial
from pathlib import Path

import numpy as np

from bench.models import DEMO
from bench.pairs import interleave, median_ratio
from bench.report import progress
from bench.rows import Origin, Row
from bench.system import RunningSystem, SystemRun, acceptance, emitted_per_round
from bench.workload import NUM_NEW_TOKENS, prompt_token_ids

SUITE = "drafts"
CASE = "deep(18, 0.02), 1 stream, greedy; the demo target's EAGLE-3 head"
HEAD, MODEL, TARGET_ONLY = "eagle3_local", "draft_model_remote", "target_only"
NUM_QUICK_PROMPTS = 3


def measure(target_dir: Path, quick: bool) -> list[Row]:
    """Runs head, draft model and target alone by turns.

    Args:
        target_dir: the deep target.
        quick: a few prompts only.
    """
    prompts = prompt_token_ids(target_dir)
    prompts = prompts[:NUM_QUICK_PROMPTS] if quick else prompts
    options = {"max_new_tokens": NUM_NEW_TOKENS, "temperature": 0.0}
    with (
        RunningSystem(target_dir, None, lookup=(f"eagle3:{DEMO / 'eagle3'}",)) as head,
        RunningSystem(target_dir, DEMO / "draft") as model,
    ):
        systems = {
            HEAD: partial(head.run, **options),
            MODEL: partial(model.run, **options),
            # Without its BOS the prompt shares no prefix with the other run of it.
            TARGET_ONLY: lambda prompt: model.run(prompt[1:], mode="off", **options),
        }
        with progress("EAGLE-3", (2 + len(prompts)) * len(systems)) as advance:
            interleave([prompt[::-1] for prompt in prompts[:2]], systems, advance)
            return _rows(interleave(prompts, systems, advance), quick)


def _rows(runs: dict[str, list[SystemRun]], quick: bool) -> list[Row]:
    rates = {name: [len(run.token_ids) / run.e2el_s for run in done] for name, done in runs.items()}
    row = partial(Row, suite=SUITE, case=CASE, origin=Origin(), quick=quick)
    rows = []
    for number, other, required in ((32, MODEL, 1.2), (None, TARGET_ONLY, None)):
        ratio = median_ratio(rates[HEAD], rates[other])
        rows.append(
            row(
                row=number, system=HEAD, metric="tokens_per_s_ratio", value=ratio.median, unit="x", ratio_to=other,
                low=ratio.low, high=ratio.high, num_pairs=ratio.num_pairs, required=required,
            )
        )  # fmt: skip
    for name, measured in rates.items():
        figures = {"tokens_per_s": (float(np.median(measured)), "tokens/s")}
        if name != TARGET_ONLY:
            figures |= {"alpha": (acceptance(runs[name]), ""), "tau": (emitted_per_round(runs[name]), "tokens/round")}
        rows += [
            row(row=None, system=name, metric=metric, value=value, unit=unit)
            for metric, (value, unit) in figures.items()
        ]
    same = [ours.token_ids == model.token_ids for ours, model in zip(runs[HEAD], runs[MODEL], strict=True)]
    rows.append(row(row=None, system=HEAD, metric="texts_equal_to_draft_model", value=float(np.mean(same)), unit=""))
    return rows
