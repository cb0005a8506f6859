"""Row 35 of suite `drafts`: the cost of another tokenizer in a draft's acceptance, all else being equal.

Two draft models of the demo draft's shape learn the same documents for as many steps by the same recipe, from nothing:
one with the target's tokenizer, one with a tokenizer of as many tokens that was made from other text (every other file,
and prose). Both then draft for the demo target. They have seen a fraction of what the demo draft has, so alpha is lower
than that draft's; only the ratio is reported. Called by `drafts`.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast

from bench.harness.pairs import Ratio, resampled, take_turns
from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.harness.workload import GAMMA, NUM_NEW_TOKENS, NUM_THREADS, prompt_token_ids
from bench.systems.models import DEMO, demo_module
from bench.systems.ours import RunningSystem, SystemRun, acceptance

SAME, OTHER = "target's tokenizer", "other tokenizer"
NUM_STEPS, NUM_QUICK_STEPS = 600, 20
NUM_PROMPTS, NUM_QUICK_PROMPTS = 20, 3
SAMPLING = {"greedy": {"temperature": 0.0}, "T = 1": {"temperature": 1.0, "seed": 1}}


def rows(suite: str, quick: bool) -> list[Row]:
    """Trains both drafts and measures them; some minutes."""
    num_steps, num_prompts = (NUM_QUICK_STEPS, NUM_QUICK_PROMPTS) if quick else (NUM_STEPS, NUM_PROMPTS)
    prompts = prompt_token_ids(DEMO / "target")[:num_prompts]
    case = f"demo, drafts of {num_steps} steps"
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        drafts = _trained(Path(folder), num_steps)
        with (
            RunningSystem(DEMO / "target", drafts[SAME]) as same,
            RunningSystem(DEMO / "target", drafts[OTHER]) as other,
        ):
            for sampling, options in SAMPLING.items():
                systems = {
                    name: partial(system.run, max_new_tokens=NUM_NEW_TOKENS, gamma=GAMMA, **options)
                    for name, system in ((SAME, same), (OTHER, other))
                }
                runs: dict[str, list[SystemRun]] = take_turns(f"retokenised, {sampling}", systems, prompts)
                row = partial(Row, suite=suite, case=f"{case}, {sampling}", origin=Origin(), quick=quick, unit="")
                found.append(
                    row(row=35, system=OTHER, metric="alpha_ratio", ratio_to=SAME, required=0.8, **_ratio(runs).fields)
                )
                found += [row(system=name, metric="alpha", value=acceptance(done)) for name, done in runs.items()]
    return found


def _ratio(runs: dict[str, list[SystemRun]]) -> Ratio:
    """Return the ratio of the two alphas over all prompts."""
    counts = {
        name: np.array([(run.stats.num_accepted_tokens, run.num_tested_tokens) for run in done])
        for name, done in runs.items()
    }  # [N, 2] each

    def ratio(chosen: np.ndarray) -> np.ndarray:
        sums = {name: of_prompts[chosen].sum(axis=-2) for name, of_prompts in counts.items()}
        other, same = (sums[name][..., 0] / sums[name][..., 1] for name in (OTHER, SAME))
        return other / same

    return resampled(ratio, len(runs[SAME]))


def _trained(folder: Path, num_steps: int) -> dict[str, Path]:
    """Both drafts, as checkpoints."""
    corpus, train = demo_module("corpus"), demo_module("train")
    files = [file for file in corpus.standard_library_files() if not file.held_out]
    tokenizers = {
        SAME: PreTrainedTokenizerFast.from_pretrained(DEMO / "target"),
        OTHER: train.train_tokenizer([*(file.text for file in files[::2]), *corpus.prose(files[1::2], held_out=False)]),
    }
    documents = corpus.documents(files, seed=1)
    made = {}
    torch.set_num_threads(NUM_THREADS)
    with progress("two drafts learn", len(tokenizers) * num_steps) as advance:
        for name, tokenizer in tokenizers.items():
            made[name] = folder / name.split()[0]
            _train(train, tokenizer, documents, num_steps, made[name], advance)
    return made


def _train(
    train: ModuleType,
    tokenizer: PreTrainedTokenizerFast,
    documents: Sequence[str],
    num_steps: int,
    directory: Path,
    advance: Callable[[], None],
) -> None:
    plan = train.TrainingPlan(num_steps=num_steps, num_draft_steps=0)
    torch.manual_seed(plan.seed)
    model = train.new_model(128, 344, num_layers=2, num_heads=4, initial_std=plan.initial_std)
    batches = train.Batches(train.token_stream(tokenizer, documents), plan)
    optimizers = train.Optimizers(model, num_steps, plan)
    for index in range(num_steps):
        batch = batches.at(index)
        logits = train.logits_of(model, batch[:, :-1], bf16=False)
        functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizers.step()
        advance()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.half().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
