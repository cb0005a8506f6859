"""Row 38 of suite `drafts`: how much of the acceptance lost to a workload shift is regained by distilling.

The shift: the demo's code draft serves prose, at T = 0.7, one stream; the loss is the advantage of the draft
trained for prose. `specdec up --learning-log` serves, `specdec distill` trains beside it on the same cores for 20
minutes on the served text, and the new version joins. Alpha is the expected one, the sum of min(p, q) computed with
Hugging Face's forward passes, on the same answers to prompts that were never served before, so that the drafts are
compared on equal tokens; the measured alpha of requests is reported beside it. To time serving alone, the training is
paused by turns, and those seconds do not count. Called by `drafts`.
"""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.harness.pairs import Ratio, rate_rows, ratio_row, resampled, take_turns
from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.systems.models import DEMO, demo_module
from bench.systems.ours import RunningSystem, SystemRun, acceptance

CASE = "demo, prose at T = 0.7 drafted by the code draft"
BEFORE, MATCHED, AFTER = "code", "prose", "distilled"
NUM_NEW_TOKENS, GAMMA, TEMPERATURE = 128, 4, 0.7
PROMPT_CHARACTERS = 480
NUM_WARM_REQUESTS = 12

#: Minutes of training, pairs of stretches with and without it, seconds of a stretch, prompts to measure by.
FULL, QUICK = (20.0, 10, 20.0, 160), (2.0, 3, 8.0, 12)

#: Prompts that every draft answers; the other prompts are answered by the target alone.
MAX_SERVED = 40


def rows(suite: str, quick: bool) -> list[Row]:
    """Measure and return the rows of `suite`; prints nothing but progress."""
    minutes, num_pairs, stretch_s, num_prompts = QUICK if quick else FULL
    row = partial(Row, suite=suite, case=CASE, origin=Origin(), quick=quick)
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        log, made = Path(folder) / "log", Path(folder) / "made"
        flags = ("--route", "auto", "--learning-log", str(log))
        drafts = [f"{BEFORE}={DEMO / 'draft'}", f"{MATCHED}={DEMO / 'prose'}"]
        with RunningSystem(DEMO / "target", None, drafts=drafts, flags=flags) as system:
            load = _Load(system)
            for _ in range(NUM_WARM_REQUESTS):
                load.serve()
            time.sleep(6.0)  # the first of them are in the log
            rates, said = _distil_beside(load, system, log, made, minutes, num_pairs, stretch_s)
            speed = ratio_row(row, rates, "serving beside", "serving alone", row=38, required=0.9)
            if not made.is_dir():  # it learned nothing, which is a result too
                return [row(row=38, system=AFTER, metric="lost_alpha_regained", value=0.0, unit="", required=0.5,
                            note=said), speed]  # fmt: skip
            prompts = [system.client.tokenize(text) for text in _prose(held_out=True)[:num_prompts]]
            served, texts = _serve_each(system, prompts)
        alphas = _expected_alphas(texts, {BEFORE: DEMO / "draft", MATCHED: DEMO / "prose", AFTER: made})
    told = [
        row(row=38, system=AFTER, metric="lost_alpha_regained", unit="", required=0.5,
            ratio_to=f"{MATCHED} less {BEFORE}", **_regained(alphas).fields,
            note=f"{minutes:g} minutes beside one stream; 95 % interval over the prompts. {said}"),
        speed,
    ]  # fmt: skip
    for name in (BEFORE, MATCHED, AFTER):
        told.append(row(system=name, metric="alpha_expected", value=float(alphas[name].mean()), unit=""))
        told.append(row(system=name, metric="alpha_served", value=acceptance(served[name]), unit=""))
    return told + rate_rows(row, rates)


class _Load:
    """One stream of requests for prose, each with its own prompt while prompts last."""

    def __init__(self, system: RunningSystem) -> None:
        self._system = system
        self._prompts: Iterator[str] = cycle(_prose(held_out=False))
        self._seed = 0

    def serve(self) -> SystemRun:
        self._seed += 1
        prompt = self._system.client.tokenize(next(self._prompts))
        return _ask(self._system, prompt, BEFORE, seed=self._seed)

    def rate(self, seconds: float) -> float:
        """Return the tokens a second of the requests that begin within the given time."""
        began, num_tokens, spent_s = time.monotonic(), 0, 0.0
        while time.monotonic() - began < seconds:
            run = self.serve()
            num_tokens, spent_s = num_tokens + len(run.token_ids), spent_s + run.e2el_s
        return num_tokens / spent_s


def _distil_beside(
    load: _Load, system: RunningSystem, log: Path, made: Path, minutes: float, num_pairs: int, stretch_s: float
) -> tuple[dict[str, list[float]], str]:
    """Return tokens a second of serving with and without training beside it, and the last line of the training.

    Return once the new version has joined, or once the training ended without one.
    """
    halted_s = num_pairs * stretch_s
    command = [sys.executable, "-m", "specdec.cli", "distill", "--log", str(log), "--draft", str(DEMO / "draft")]
    command += ["--out", str(made), "--minutes", str(minutes + halted_s / 60.0), "--join", AFTER]
    command += ["--endpoint", system.endpoint]
    with tempfile.TemporaryFile("w+") as said:
        trainer = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            load.rate(stretch_s)  # it reads the log and loads the draft

            def measure(is_beside: bool, _case: int) -> float:
                trainer.send_signal(signal.SIGCONT if is_beside else signal.SIGSTOP)
                return load.rate(stretch_s)

            systems = {"serving beside": partial(measure, True), "serving alone": partial(measure, False)}
            rates = take_turns("serving beside training", systems, range(num_pairs))
            trainer.send_signal(signal.SIGCONT)
            while trainer.poll() is None:
                load.serve()
        finally:
            if trainer.poll() is None:
                trainer.send_signal(signal.SIGCONT)
                trainer.terminate()
                trainer.wait()
        said.seek(0)
        lines = [line for line in said.read().splitlines() if " held-out tokens; " in line]
        if not lines:
            said.seek(0)
            raise RuntimeError(f"specdec distill: {said.read()[-500:]}")
    return rates, f"KL {lines[-1].partition('KL ')[2]}"


def _serve_each(
    system: RunningSystem, prompts: Sequence[Sequence[int]]
) -> tuple[dict[str, list[SystemRun]], list[tuple[list[int], list[int]]]]:
    """Return each draft's answers to the first prompts, and all prompts with the target's own answers."""
    seeds = range(10**6, 10**6 + len(prompts))
    cases = list(zip(map(list, prompts), seeds, strict=True))
    drafted = cases[:MAX_SERVED]
    systems = {
        pool: lambda case, pool=pool: _ask(system, case[0], pool, seed=case[1]) for pool in (BEFORE, MATCHED, AFTER)
    }
    served = take_turns("answers", systems, drafted)
    texts = []
    with progress("texts of the target", len(cases)) as advance:
        for prompt, seed in cases:
            alone = system.run(prompt, NUM_NEW_TOKENS, temperature=TEMPERATURE, mode="off", seed=seed)
            texts.append((prompt, alone.token_ids))
            advance()
    return served, texts


def _ask(system: RunningSystem, prompt: Sequence[int], pool: str, seed: int) -> SystemRun:
    return system.run(
        list(prompt), NUM_NEW_TOKENS, temperature=TEMPERATURE, gamma=GAMMA, draft_pool=pool, seed=seed, mode="rejection"
    )


@torch.inference_mode()
def _expected_alphas(texts: Sequence[tuple[list[int], list[int]]], drafts: dict[str, Path]) -> dict[str, np.ndarray]:
    """Return by draft, float [N]: the mean over each answer's tokens of the sum of min(p, q)."""
    models = {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for name, path in ({"target": DEMO / "target"} | drafts).items()
    }
    alphas: dict[str, list[float]] = {name: [] for name in drafts}
    for prompt, answer in texts:
        token_ids = torch.tensor([[*prompt, *answer]])
        laws = {
            name: (model(token_ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE).softmax(-1)
            for name, model in models.items()
        }  # [T, V]
        for name in drafts:
            alphas[name].append(torch.minimum(laws["target"], laws[name]).sum(-1).mean().item())
    return {name: np.array(of_texts) for name, of_texts in alphas.items()}


def _regained(alphas: dict[str, np.ndarray]) -> Ratio:
    """Return the share of the lost alpha that was regained."""

    def share(chosen: np.ndarray) -> np.ndarray:
        before, matched, after = (alphas[name][chosen].mean(axis=-1) for name in (BEFORE, MATCHED, AFTER))
        return (after - before) / (matched - before)

    return resampled(share, len(alphas[BEFORE]))


def _prose(*, held_out: bool) -> list[str]:
    """Yield paragraph starts, one after another from each text of the corpus in turn."""
    corpus = demo_module("corpus")
    texts = corpus.prose(corpus.standard_library_files(), held_out=held_out)
    cuts = [[text[at : at + PROMPT_CHARACTERS].rstrip() for at in _beginnings(text)] for text in texts]
    rounds = [[of_text[index] for of_text in cuts if index < len(of_text)] for index in range(max(map(len, cuts)))]
    return [text for each in rounds for text in each if len(text) > PROMPT_CHARACTERS // 2]


def _beginnings(text: str) -> list[int]:
    """Return the paragraphs of a text at which a prompt may begin, far enough apart that no two prompts overlap."""
    found = [0]
    while (following := text.find("\n\n", found[-1] + PROMPT_CHARACTERS)) >= 0:
        found.append(following + 2)
    return found
