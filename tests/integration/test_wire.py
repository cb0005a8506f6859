"""The bytes that a round costs on both links, at the vocabulary of a real model.

The laws are made, not trained: Zipf-like over 151,936 tokens, flat enough that 64 support entries never cover 0.99, the
target's a noisy copy of the draft's. Everything else is what ships: engines, gRPC, coordinator.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.systems.simulated import write_tokenizer
from bench.systems.zipf import EXPONENT, ZipfWorker
from specdec.contract.types import TokenSource
from specdec.engine.simulated.text import VOCABULARY_SIZE
from tests.support.model_stack import ModelStack

SUPPORT = 64
GAMMA = 4
#: Standard deviation of the target's log probabilities around the draft's, which gives an alpha of 0.8.
NOISE = 0.35


async def test_a_round_at_a_real_vocabulary_costs_at_most_four_kilobytes(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    law = np.arange(1, VOCABULARY_SIZE + 1) ** -EXPONENT
    top_mass = law[:SUPPORT].sum() / law.sum()
    assert top_mass <= 0.9
    async with ModelStack(tmp_path, ZipfWorker(NOISE), {"default": ZipfWorker(0.0)}) as stack:
        completions = [
            await stack.generate(
                [5, 6, 7], max_new_tokens=300, temperature=1.0, seed=seed, gamma=GAMMA, mode="rejection",
                ignore_eos=True, provenance=True,
            )
            for seed in range(2)
        ]  # fmt: skip
    sources = [detail.source for completion in completions for detail in completion.details]
    num_accepted = sources.count(TokenSource.ACCEPTED)
    alpha = num_accepted / (num_accepted + sources.count(TokenSource.CORRECTED))
    num_rounds = sum(completion.stats.num_rounds for completion in completions)
    bytes_per_round = sum(completion.stats.wire_bytes for completion in completions) / num_rounds
    print(f"{bytes_per_round:.0f} bytes a round, alpha {alpha:.3f}, {num_rounds} rounds, top-64 mass {top_mass:.3f}")
    assert 0.78 <= alpha <= 0.82
    assert bytes_per_round <= 4096
