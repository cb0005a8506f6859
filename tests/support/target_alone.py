"""What a target computes alone: the oracle of everything the running services emit.

In float32 that is Hugging Face's own model. A target whose weights or arithmetic are rounded has another law, and is
its own oracle: the engine's worker, without services, drafts or company. Called by end-to-end tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from specdec.contract.types import SamplingFilters
from specdec.core.reference import filtered_distribution
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.loader import load_worker
from specdec.engine.options import LoadRequest
from specdec.engine.sessions.block_manager import blocks_for

NUM_KV_BLOCKS = 32


class TargetAlone:
    """One checkpoint in one arithmetic."""

    def __init__(self, checkpoint: Path, dtype: str = "float32") -> None:
        """`dtype`: float32, or what the target service is started with."""
        self.dtype = dtype
        self._model: torch.nn.Module | None = None
        self._worker: Worker | None = None
        if dtype == "float32":
            self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        else:
            self._worker = load_worker(
                LoadRequest(str(checkpoint), device="cpu", dtype=dtype, num_kv_blocks=NUM_KV_BLOCKS)
            )

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [T, V]: the row that follows each token."""
        if self._worker is not None:
            return _run(self._worker, token_ids, 0, len(token_ids)).numpy()
        return self._model(torch.tensor([list(token_ids)])).logits[0].numpy()

    def law(self, token_ids: Sequence[int], filters: SamplingFilters, output_start: int) -> np.ndarray:
        """float64 [V]: the law that follows `token_ids`, by the reference filters."""
        return filtered_distribution(self.logits(token_ids)[-1], filters, np.array(token_ids, np.uint32), output_start)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The likeliest continuation; it ends after an end token."""
        if self._model is not None:
            ids = torch.tensor([list(prompt)])
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
            )
            return output[0, len(prompt) :].tolist()
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_tokens:
            start = 0 if len(tokens) == len(prompt) else len(tokens) - 1
            tokens.append(int(_run(self._worker, tokens, start, 1).argmax()))
            if tokens[-1] in self._worker.shape.eos_token_ids:
                break
        return tokens[len(prompt) :]


@torch.inference_mode()
def _run(worker: Worker, token_ids: Sequence[int], start: int, num_rows: int) -> torch.Tensor:
    """Logits of the last rows; KV of what stands before `start` is there already."""
    blocks = tuple(range(blocks_for(len(token_ids))))
    return worker.execute(StepPlan((SequenceSlice(tuple(token_ids[start:]), start, blocks, num_rows),)))
