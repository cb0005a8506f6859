"""Acceptance rates of drafts: a loss of acceptance is a fault that no text would show.

Draft = target must accept everything, greedy and coupled; at T = 1 exactly the mass its supports cover. Also after the
draft service was restarted in the middle, which must not leave a hole in its KV, with pre-drafting, and with int8
weights, whose target is its own oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.client import Client, Completion
from specdec.contract.types import SamplingFilters, TokenSource
from specdec.core.reference import cut_support, filtered_distribution
from specdec.core.sparse import default_s_max
from tests.support.stack import Stack
from tests.support.target_alone import TargetAlone

NUM_REQUESTS = 10
NUM_TOKENS = 200
GAMMA = 4
#: Two-sided standard normal: the T = 1 test is a false alarm once in 15,000 runs; its seeds are fixed.
Z = 4.0


def positions_of_tests(completion: Completion) -> list[int]:
    """Output indices at which a draft token was tested."""
    tested = (TokenSource.ACCEPTED, TokenSource.CORRECTED)
    return [index for index, detail in enumerate(completion.details) if detail.source in tested]


def covered_mass(alone: TargetAlone, prompt: Sequence[int], completion: Completion) -> list[float]:
    """p(S) at each tested position, from the target's logits: with draft = target, the chance of acceptance."""
    ids = [*prompt, *completion.token_ids]
    logits = alone.logits(ids)
    masses = []
    for index in positions_of_tests(completion):
        position = len(prompt) + index
        law = filtered_distribution(
            logits[position - 1], SamplingFilters(), np.array(ids[:position], np.uint32), len(prompt)
        )
        _, lost_mass = cut_support(law, default_s_max(len(law)))
        masses.append(1.0 - lost_mass)
    return masses


def wait_until_drafted(client: Client) -> None:
    """Returns once the coordinator has found the restarted draft: without one, streams end sooner than it loads."""
    while True:
        probe = client.generate(prompt_token_ids=[5, 6, 7], max_new_tokens=8, gamma=GAMMA, provenance=True)
        if any(detail.source is TokenSource.ACCEPTED for detail in probe.details):
            return


def check_acceptance(target: Path, mode: str, *, predraft: str = "off", dtype: str = "float32") -> None:
    options: dict[str, Any] = {"mode": "rejection" if mode == "greedy" else mode}
    options["temperature"] = 0.0 if mode == "greedy" else 1.0
    prompts = [np.random.default_rng(index).integers(2, 256, 20 + 7 * index).tolist() for index in range(NUM_REQUESTS)]
    completions = []
    with (
        Stack(
            target,
            target,
            replica_arguments=("--dtype", dtype),
            draft_arguments=("--predraft", predraft),
            coordinator_arguments=("--draft-timeout-s", "none"),
        ) as stack,
        Client(stack.endpoint) as client,
    ):
        for index, prompt in enumerate(prompts):
            stream = client.generate(
                prompt_token_ids=prompt, max_new_tokens=NUM_TOKENS, gamma=GAMMA, seed=index, ignore_eos=True,
                provenance=True, stream=True, **options,
            )  # fmt: skip
            if index == NUM_REQUESTS // 2:
                next(stream)
                stack.kill("draft")
                next(stream)
                stack.restart("draft")
            completions.append(stream.result())
            if index == NUM_REQUESTS // 2:
                wait_until_drafted(client)
    sources = [detail.source for completion in completions for detail in completion.details]
    num_accepted = sources.count(TokenSource.ACCEPTED)
    num_tested = num_accepted + sources.count(TokenSource.CORRECTED)
    alpha = num_accepted / num_tested
    print(f"{mode}: alpha {alpha:.4f} over {num_tested} tested tokens, {sources.count(TokenSource.TARGET)} target-only")
    assert num_tested > 0.7 * NUM_REQUESTS * NUM_TOKENS * GAMMA / (GAMMA + 1)
    if mode != "rejection":
        assert alpha >= 1.0 - 1e-3
        return
    alone = TargetAlone(target, dtype)
    masses = [
        mass
        for prompt, completion in zip(prompts, completions, strict=True)
        for mass in covered_mass(alone, prompt, completion)
    ]
    deviation = np.sqrt(sum(mass * (1.0 - mass) for mass in masses)) / len(masses)
    print(f"mean p(S) {np.mean(masses):.4f}, z = {(alpha - np.mean(masses)) / deviation:.2f}")
    assert abs(alpha - np.mean(masses)) < Z * deviation


def test_a_draft_that_is_the_target_is_accepted_also_after_a_restart(llama_pair: tuple[Path, Path]) -> None:
    check_acceptance(llama_pair[0], "rejection", predraft="on")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
@pytest.mark.parametrize(
    ("predraft", "dtype"), [("off", "float32"), ("on", "float32"), ("auto", "float32"), ("off", "int8"), ("on", "int8")]
)
def test_a_draft_that_is_the_target_is_accepted_in_every_setup(
    llama_pair: tuple[Path, Path], mode: str, predraft: str, dtype: str
) -> None:
    check_acceptance(llama_pair[0], mode, predraft=predraft, dtype=dtype)


def test_a_perturbed_draft_would_be_noticed(llama_pair: tuple[Path, Path]) -> None:
    """Negative control: the perturbed copy is not accepted as often as the target itself."""
    with Stack(*llama_pair) as stack, Client(stack.endpoint) as client:
        completion = client.generate(
            prompt_token_ids=[5, 6, 7], max_new_tokens=NUM_TOKENS, gamma=GAMMA, temperature=0.0, provenance=True
        )
    sources = [detail.source for detail in completion.details]
    assert sources.count(TokenSource.CORRECTED) > 5
