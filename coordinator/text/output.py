"""Turns the tokens of a request's rounds into output: text per token, and the token that ends the output.

Tokens come from `generation/generation`, and their text from `detokenizer`. The output goes back to the generation, and
then to `generation/publisher`. Text is produced token by token, so the text after n tokens depends on those n tokens
alone, and a replay from the log gives the same text however the rounds were cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.text.detokenizer import IncrementalDetokenizer
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.types import FinishReason, SamplingParams


class OutputStep(NamedTuple):
    """Output tokens of one round."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """Text that each token completed."""
    finish_reason: FinishReason | None


class OutputWriter:
    """Takes decided tokens until one of them ends the output. One object writes one output."""

    def __init__(
        self,
        tokenizer: ServedTokenizer,
        sampling: SamplingParams,
        eos_token_ids: Sequence[int],
        before: Sequence[int] = (),
    ) -> None:
        """
        Args:
            tokenizer: tokenizer of the target model.
            sampling: resolved parameters; `max_new_tokens` is above 0.
            eos_token_ids: end tokens of the target model.
            before: tokens of the text that the output continues; empty if the output begins a text.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, sampling.stop, before)
        self.end_token_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self._max_new_tokens = sampling.max_new_tokens
        self._num_tokens = 0

    @property
    def remaining(self) -> int:
        """Number of output tokens that may still follow."""
        return self._max_new_tokens - self._num_tokens

    def write(self, token_ids: Sequence[int]) -> OutputStep:
        """Take tokens up to the one that ends the output, and discard those after it."""
        texts: list[str] = []
        detokenizer, end_token_ids = self._detokenizer, self.end_token_ids
        finish_reason: FinishReason | None = None
        for token_id in token_ids:
            self._num_tokens += 1
            if token_id in end_token_ids:
                # An end token has no text, but it makes text final that was held back as the start of a stop string.
                text, finish_reason = detokenizer.finish(), FinishReason.STOP
            else:
                text = detokenizer.push_token(token_id)
                if detokenizer.has_ended:
                    finish_reason = FinishReason.STOP_STRING
                elif self._num_tokens == self._max_new_tokens:
                    text, finish_reason = text + detokenizer.finish(), FinishReason.LENGTH
            texts.append(text)
            if finish_reason is not None:
                break
        return OutputStep(tuple(token_ids[: len(texts)]), tuple(texts), finish_reason)
