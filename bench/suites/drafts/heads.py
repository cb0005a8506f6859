"""Row 32 of suite `drafts`: an EAGLE-3 head in the target against a separate draft model, greedy, one stream.

The target is `deep(18, 0.02)` and the head is the demo target's (`models/demo/eagle3`), unchanged: it reads the hidden
states 2, 4 and 6, which the deep target has too, since its first six layers are the demo target's. The draft model is
the demo draft, in a service of its own. Both choose gamma by themselves. `local` measures early exit. Called
by `drafts`.
"""

from functools import partial
from pathlib import Path

from bench.harness.pairs import take_turns
from bench.harness.rows import Origin, Row
from bench.harness.workload import NUM_NEW_TOKENS, prompt_token_ids
from bench.suites.drafts.rows import same_text_row, speed_rows
from bench.systems.models import DEMO
from bench.systems.ours import RunningSystem, SystemRun

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
        warmup = [prompt[::-1] for prompt in prompts[:2]]
        return _rows(take_turns("EAGLE-3", systems, prompts, warmup), quick)


def _rows(runs: dict[str, list[SystemRun]], quick: bool) -> list[Row]:
    row = partial(Row, suite=SUITE, case=CASE, origin=Origin(), quick=quick)
    comparisons = ((32, HEAD, MODEL, 1.2), (None, HEAD, TARGET_ONLY, None))
    return [*speed_rows(runs, row, comparisons, (HEAD, MODEL)), same_text_row(runs, row, HEAD, MODEL)]
