"""The masked target, which a constrained request must equal, computed token by token without any service.

The logits are the table model's, the masks those of a fresh matcher after every output, the distribution the
reference's. Called by tests of constrained requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.contract.constraint import Constraint
from specdec.contract.types import SamplingFilters
from specdec.core.reference import coupled_choice, filtered_distribution
from specdec.structured.matcher import Matcher
from tests.support.byte_tokenizer import EOS, VOCABULARY, byte_table
from tests.support.table_worker import TableWorker


class MaskedTarget:
    """The distribution of a constrained request's tokens."""

    def __init__(
        self,
        worker: TableWorker,
        tokenizer: Path,
        constraint: Constraint,
        prompt: Sequence[int],
        *,
        stop_token_ids: Sequence[int] = (),
        **filters: Any,
    ) -> None:
        """
        Args:
            worker: model of the target.
            tokenizer: directory of its tokenizer, by `byte_tokenizer`.
            constraint: constraint of the request.
            prompt: tokens before the output.
            stop_token_ids: further tokens that end the output.
            filters: fields of `SamplingFilters`.
        """
        self._worker = worker
        self._table = byte_table(tokenizer)
        self._constraint = constraint
        self._prompt = list(prompt)
        self.ends = tuple(sorted({EOS, *stop_token_ids}))
        self._filters = SamplingFilters(**filters, end_token_ids=self.ends)
        self._distributions: dict[tuple[int, ...], np.ndarray] = {}

    def after(self, output: Sequence[int]) -> np.ndarray:
        """Return the distribution of the token after an output: float64 [V]."""
        key = tuple(output)
        if key not in self._distributions:
            matcher = Matcher(self._table, self._constraint)
            matcher.align(np.array(output, dtype=np.uint32))
            legal = np.unpackbits(matcher.mask(self.ends), count=VOCABULARY, bitorder="little").astype(bool)
            tokens = [*self._prompt, *output]
            self._distributions[key] = filtered_distribution(
                self._worker.logits_after(tokens), self._filters, tokens, len(self._prompt), legal
            )
        return self._distributions[key]

    def greedy(self, num_tokens: int) -> list[int]:
        """Return the output of greedy decoding, with the token that ends it."""
        output: list[int] = []
        while len(output) < num_tokens and not (output and output[-1] in self.ends):
            output.append(int(np.argmax(self.after(output))))
        return output

    def coupled(self, num_tokens: int, seed: int, turn: int = 0) -> list[int]:
        """Return the output of a seed in the mode coupled, with the token that ends it."""
        output: list[int] = []
        while len(output) < num_tokens and not (output and output[-1] in self.ends):
            position = len(self._prompt) + len(output)
            output.append(coupled_choice(self.after(output), seed, turn, position))
        return output

    def outcomes(self, num_tokens: int) -> dict[tuple[int, ...], float]:
        """Return every output that ends within some tokens, or has as many, with its probability."""
        going: dict[tuple[int, ...], float] = {(): 1.0}
        ended: dict[tuple[int, ...], float] = {}
        for _ in range(num_tokens):
            grown = {
                (*output, int(token_id)): mass * float(distribution[token_id])
                for output, mass in going.items()
                for distribution in [self.after(output)]
                for token_id in np.flatnonzero(distribution)
            }
            ended |= {output: mass for output, mass in grown.items() if output[-1] in self.ends}
            going = {output: mass for output, mass in grown.items() if output[-1] not in self.ends}
        return ended | going
