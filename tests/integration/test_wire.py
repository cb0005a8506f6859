"""How many bytes a round costs on both links, at the vocabulary of a real model.

The laws are made, not trained: Zipf-like over 151,936 tokens, flat enough that 64 support entries never cover 0.99, the
target's a noisy copy of the draft's. Everything else is what ships: engines, gRPC, coordinator.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from specdec.engine.base import ModelShape, StepPlan
from specdec.types import TokenSource
from tests.coordinator_rig import write_tokenizer
from tests.model_stack import ModelStack

VOCABULARY = 151_936
SUPPORT = 64
GAMMA = 4
#: p(rank) ~ (rank + 1)^-ZIPF: the 64 likeliest of 151,936 hold 0.85.
ZIPF = 1.4
#: Standard deviation of the target's log law around the draft's, which makes alpha 0.8.
NOISE = 0.35
#: Coprime to the vocabulary: multiplying ranks by it scatters the likeliest ids over all of it.
SCATTER = 104_729


class ZipfWorker:
    """A worker whose law is Zipf over a shuffled vocabulary, shifted by the last token."""

    def __init__(self, noise: float) -> None:
        self.shape = ModelShape(
            vocabulary_size=VOCABULARY,
            max_context_tokens=4096,
            eos_token_ids=(1,),
            model_fingerprint="zipf",
            vocabulary_fingerprint="table",
            num_kv_blocks=512,
            dtype="float32",
            device="cpu",
        )
        self._noise = np.random.default_rng(0).normal(size=2 * VOCABULARY) * noise
        self._log_law = -ZIPF * np.log(np.arange(1, VOCABULARY + 1))
        self._scattered = np.arange(VOCABULARY, dtype=np.int64) * SCATTER

    def execute(self, plan: StepPlan) -> torch.Tensor:
        rows = [
            self._logits_after(token_id)
            for part in plan.slices
            for token_id in part.token_ids[len(part.token_ids) - part.num_logit_rows :]
        ]
        return torch.from_numpy(np.stack(rows) if rows else np.empty((0, VOCABULARY), np.float32))

    def _logits_after(self, last_token_id: int) -> np.ndarray:
        noise = self._noise[last_token_id : last_token_id + VOCABULARY]
        logits = np.empty(VOCABULARY, dtype=np.float32)
        logits[(self._scattered + last_token_id) % VOCABULARY] = self._log_law + noise
        return logits


async def test_a_round_at_a_real_vocabulary_costs_at_most_four_kilobytes(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    law = np.arange(1, VOCABULARY + 1) ** -ZIPF
    top_mass = law[:SUPPORT].sum() / law.sum()
    assert top_mass <= 0.9
    async with ModelStack(tmp_path, ZipfWorker(NOISE), {"default": ZipfWorker(0.0)}) as stack:
        completions = [
            await stack.generate(
                [5, 6, 7], max_new_tokens=300, temperature=1.0, seed=seed, gamma=GAMMA, mode="rejection",
                ignore_eos=True, provenance=True,
            )
            for seed in range(4)
        ]  # fmt: skip
    sources = [detail.source for completion in completions for detail in completion.details]
    num_accepted = sources.count(TokenSource.ACCEPTED)
    alpha = num_accepted / (num_accepted + sources.count(TokenSource.CORRECTED))
    num_rounds = sum(completion.stats.num_rounds for completion in completions)
    bytes_per_round = sum(completion.stats.wire_bytes for completion in completions) / num_rounds
    print(f"{bytes_per_round:.0f} bytes a round, alpha {alpha:.3f}, {num_rounds} rounds, top-64 mass {top_mass:.3f}")
    assert 0.78 <= alpha <= 0.82
    assert bytes_per_round <= 4096
