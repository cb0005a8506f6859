"""Rows 36 and 37 of suite `drafts`: requests routed among drafts, and how well scores predict a draft.

Row 36 runs triples of requests as one stream: one for code and one for prose, both sampled because greedy text of such
a small target repeats itself, and one whose text repeats its prompt, greedy as an edit would be. One
`specdec up --route auto` serves the code draft, the prose draft and `ngram`. Requests are routed, and sent to each pool
by name; the oracle gives each kind the pool that was fastest with it. `suffix` is left out because it also looks into
the outputs of other sessions, which here are the same text from another system. Row 37 runs six drafts (the demo draft
with noise of six strengths in its weights) and the drafts that the target makes itself. Texts drafted by the demo draft
are scored, then each other draft drafts the same prompts. Called by `drafts`.
"""

import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import ratio_row, take_turns
from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.harness.workload import prompt_token_ids
from bench.systems.models import DEMO, blurred, deep_target, demo_module
from bench.systems.ours import RunningSystem, SystemRun, acceptance

#: Sampling parameters of each kind of request.
KINDS = {"code": {"temperature": 0.8}, "prose": {"temperature": 0.8}, "repeating": {"temperature": 0.0}}
POOLS = ("code", "prose", "ngram")
AUTO = "route_auto"
NUM_NEW_TOKENS = 128
NUM_WARM_TRIPLES = 3

#: Draft tokens a round in row 37, which is also the stride over scored tokens.
SCORED_GAMMA = 8
NOISES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
#: Drafts that the target makes itself, by pool.
LOCAL = {
    "early-exit": f"early-exit:3:{DEMO / 'early_exit'}",
    "eagle3": f"eagle3:{DEMO / 'eagle3'}",
    "medusa": f"medusa:{DEMO / 'medusa'}",
}
NUM_SCORED_PROMPTS = 16
SCORE_PATIENCE_S = 30.0

Triple = tuple[list[int], list[int], list[int]]


def rows(suite: str, quick: bool) -> list[Row]:
    """Measure and return the rows of `suite`; print nothing but progress."""
    row = partial(Row, suite=suite, origin=Origin(), quick=quick)
    rows = _scores(row, quick)
    return rows + _routes(row, quick) if (DEMO / "prose").is_dir() else rows


def _routes(row: partial, quick: bool) -> list[Row]:
    with deep_target() as target_dir:
        drafts = [f"code={DEMO / 'draft'}", f"prose={DEMO / 'prose'}", "ngram"]
        with RunningSystem(target_dir, None, drafts=drafts, flags=("--route", "auto")) as system:
            triples = _triples(system, target_dir, NUM_WARM_TRIPLES + (3 if quick else 12))
            systems = {
                name: partial(_run, system, pool, index)
                for index, (name, pool) in enumerate([*zip(POOLS, POOLS, strict=True), (AUTO, "")])
            }
            runs = take_turns("mixed requests", systems, triples[NUM_WARM_TRIPLES:], triples[:NUM_WARM_TRIPLES])
    seconds = {name: np.array([[run.e2el_s for run in triple] for triple in done]) for name, done in runs.items()}
    totals = {name: of_system.sum(axis=1) for name, of_system in seconds.items()}
    best = min(POOLS, key=lambda pool: totals[pool].sum())
    by_kind = [min(POOLS, key=lambda pool: seconds[pool][:, kind].sum()) for kind in range(len(KINDS))]
    oracle = sum(seconds[pool][:, kind] for kind, pool in enumerate(by_kind))
    case = "deep(18, 0.02), mixed requests"
    row = partial(row, case=case)
    single = f"best_single_pool ({best})"
    rates = {AUTO: 1 / totals[AUTO], single: 1 / totals[best], "oracle": 1 / oracle}
    required = {single: 1.1, "oracle": 0.95}
    return [
        *(ratio_row(row, rates, AUTO, other, row=36, required=least) for other, least in required.items()),
        *(
            row(system=name, metric=f"tokens_per_s_{kind}", unit="tokens/s",
                value=float(NUM_NEW_TOKENS / np.median(of_system[:, index])))
            for name, of_system in seconds.items()
            for index, kind in enumerate(KINDS)
        ),
    ]  # fmt: skip


def _triples(system: RunningSystem, target_dir: Path, count: int) -> list[Triple]:
    """Prompts of each kind; the third holds a beginning, what the target made of it, and the beginning again."""
    code = prompt_token_ids(target_dir)
    corpus = demo_module("corpus")
    prose = [system.client.tokenize(text) for text in corpus.prose_prompts(corpus.standard_library_files())]
    triples = []
    for index in range(count):
        start = code[-1 - index % len(code)]
        answer = system.run(start, NUM_NEW_TOKENS, temperature=0.0, mode="off").token_ids
        triples.append((code[index % len(code)], list(prose[index % len(prose)]), [*start, *answer, *start[1:]]))
    return triples


def _run(system: RunningSystem, pool: str, num_cut: int, triple: Triple) -> list[SystemRun]:
    """Run all requests on one system.

    Args:
        num_cut: first tokens to drop from each prompt, different for each system, so that no prefix is cached.
    """
    return [
        system.run(prompt[num_cut:], NUM_NEW_TOKENS, draft_pool=pool, seed=len(prompt), mode="rejection", **sampling)
        for prompt, sampling in zip(triple, KINDS.values(), strict=True)
    ]


def _scores(row: partial, quick: bool) -> list[Row]:
    noises = NOISES[:2] if quick else NOISES
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        drafts = [f"a-own={DEMO / 'draft'}"]
        for index, noise in enumerate(noises):
            directory = blurred(DEMO / "draft", Path(folder) / f"noise-{noise}", eps=noise, seed=index)
            drafts.append(f"noise-{noise}={directory}")
        drafts += LOCAL.values()
        prompts = prompt_token_ids(DEMO / "target")[: 3 if quick else NUM_SCORED_PROMPTS]
        with RunningSystem(DEMO / "target", None, drafts=drafts, flags=("--route", "auto")) as system:
            options = {"max_new_tokens": NUM_NEW_TOKENS, "temperature": 0.0, "gamma": SCORED_GAMMA}
            names = [*(f"noise-{noise}" for noise in noises), *LOCAL]
            with progress("scored drafts", len(prompts) * (1 + len(names))) as advance:
                for index, prompt in enumerate(prompts):
                    system.run(prompt, task=f"p{index}", **options)
                    _await_scores(system, names, index + 1)  # a target scores its own drafts while it is idle
                    advance()
                scores = _settled_scores(system, names, len(prompts))
                used = {}
                for name in names:
                    runs = []
                    for prompt in prompts:
                        runs.append(system.run(prompt, draft_pool=name, **options))
                        advance()
                    used[name] = float(np.mean([acceptance([run]) for run in runs]))
    rows, case = [], "demo, greedy, gamma 8"
    errors = [abs(scores[name] / used[name] - 1.0) for name in names]
    for name in names:
        rows.append(row(case=case, system=name, metric="alpha_scored", value=scores[name], unit=""))
        rows.append(row(case=case, system=name, metric="alpha_used", value=used[name], unit=""))
    rows.append(row(row=37, case=case, system="shadow_scores", metric="largest_error", value=max(errors), unit="",
                    at_most=0.03))  # fmt: skip
    return rows


def _alphas(system: RunningSystem, names: list[str]) -> dict[str, dict[str, float]]:
    """Return the measured alpha by pool and class."""
    pools = {pool.name: pool for pool in system.client.info().pools}
    return {
        name: {route.request_class: route.alpha for route in pools[name].routes if route.alpha is not None}
        for name in names
    }


def _await_scores(system: RunningSystem, names: list[str], num_classes: int) -> None:
    """Return once every pool has scores for this many classes."""
    until_s = time.monotonic() + SCORE_PATIENCE_S
    while not all(len(of_pool) >= num_classes for of_pool in _alphas(system, names).values()):
        if time.monotonic() > until_s:
            raise RuntimeError(f"after {SCORE_PATIENCE_S:.0f} s of idleness pools lack scores of a prompt")
        time.sleep(0.2)


def _settled_scores(system: RunningSystem, names: list[str], num_prompts: int) -> dict[str, float]:
    """Return the mean alpha over the prompts (one class each) once no score changes any more."""
    before: dict[str, dict[str, float]] = {}
    while (alphas := _alphas(system, names)) != before:
        before = alphas
        time.sleep(3.0)
    return {name: sum(of_pool.values()) / num_prompts for name, of_pool in alphas.items()}
