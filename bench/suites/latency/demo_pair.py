"""The demo pair's own rows of suite `latency`: sampling at T = 1 with gamma auto (row 4), and int8 (row 13).

Called by the suite `latency`.
"""

import sys
from functools import partial

from bench.harness.pairs import interleave, median_ratio
from bench.harness.report import progress
from bench.harness.rows import Origin, Row
from bench.harness.workload import GAMMA, NUM_NEW_TOKENS, NUM_THREADS, prompt_token_ids
from bench.systems.models import DEMO
from bench.systems.ours import RunningSystem, SystemRun
from bench.systems.transformers import PeerProcess, PeerRun

_SUITE = "latency"


def sampled_rows(num_prompts: int, quick: bool) -> list[Row]:
    """Row 4: our sampling without filters against assisted generation's."""
    prompts = prompt_token_ids(DEMO / "target")[:num_prompts]
    with (
        RunningSystem(DEMO / "target", DEMO / "draft") as ours,
        PeerProcess(DEMO / "target", DEMO / "draft", NUM_THREADS) as peer,
    ):

        def run_ours(index: int) -> SystemRun:
            return ours.run(
                prompts[index], max_new_tokens=NUM_NEW_TOKENS, temperature=1.0, seed=index, mode="rejection"
            )

        def run_peer(index: int) -> PeerRun:
            return peer.run("assisted", prompts[index], NUM_NEW_TOKENS, GAMMA, seed=index)

        # Warm up with texts that share no prefix with the measured ones.
        for prompt in prompts[:2]:
            ours.run(prompt[::-1], max_new_tokens=NUM_NEW_TOKENS, temperature=1.0)
            peer.run("assisted", prompt[::-1], NUM_NEW_TOKENS, GAMMA, seed=0)
        with progress("demo pair, T = 1", 2 * len(prompts)) as advance:
            runs = interleave(range(len(prompts)), {"specdec": run_ours, "hf_assisted": run_peer}, advance)
    return [_ratio_row(4, "demo pair, 1 stream, T = 1, gamma auto", runs, 1.5, quick)]


def int8_rows(num_prompts: int, quick: bool) -> list[Row]:
    """Return row 13, or no row and a printed reason where int8 is refused."""
    prompts = prompt_token_ids(DEMO / "target")[:num_prompts]
    try:
        with (
            RunningSystem(DEMO / "target", DEMO / "draft", dtype="int8") as quantised,
            RunningSystem(DEMO / "target", DEMO / "draft", dtype="float32") as plain,
        ):
            options = {"max_new_tokens": NUM_NEW_TOKENS, "temperature": 0.0, "mode": "off"}
            systems = {
                "int8": partial(quantised.run, **options),
                "float32": partial(plain.run, **options),
            }
            with progress("demo pair, int8", 2 * (2 + len(prompts))) as advance:
                interleave([prompt[::-1] for prompt in prompts[:2]], systems, advance)
                runs = interleave(prompts, systems, advance)
    except RuntimeError as error:
        print(f"row 13 left out: {error}", file=sys.stderr)
        return []
    return [_ratio_row(13, "demo pair, 1 stream, greedy, target-only", runs, 1.3, quick)]


def _ratio_row(number: int, case: str, runs: dict[str, list], required: float, quick: bool) -> Row:
    ours, other = runs
    rates = {name: [len(run.token_ids) / run.e2el_s for run in done] for name, done in runs.items()}
    ratio = median_ratio(rates[ours], rates[other])
    return Row(
        suite=_SUITE,
        row=number,
        case=case,
        system=ours,
        metric="tokens_per_s_ratio",
        value=ratio.median,
        unit="x",
        origin=Origin(),
        ratio_to=other,
        low=ratio.low,
        high=ratio.high,
        num_pairs=ratio.num_pairs,
        required=required,
        quick=quick,
    )
