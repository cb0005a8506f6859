"""One request's output as it grows: text per token, and the token that ends it.

A round's tokens come from `generation/generation`; their text from `detokenizer`. What of them belongs to the output
goes back there, to be published (`generation/publisher`).
Text is worked out token by token, so what a client has read after n tokens depends on those n tokens alone: whatever
the rounds were, a replay from the log gives the same text. Not here: committing, streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.text.detokenizer import IncrementalDetokenizer
from coordinator.text.tokenizer import ServedTokenizer
from specdec.types import FinishReason, SamplingParams


class OutputStep(NamedTuple):
    """What one round added."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """Text each token completed."""
    finish_reason: FinishReason | None


class OutputWriter:
    """Turns decided tokens into output tokens until one of them ends the output."""

    def __init__(self, tokenizer: ServedTokenizer, sampling: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        """`sampling.max_new_tokens` must be the resolved limit, above 0."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, sampling.stop)
        self._end_token_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self._max_new_tokens = sampling.max_new_tokens
        self._num_tokens = 0

    @property
    def remaining(self) -> int:
        """Output tokens that may still follow."""
        return self._max_new_tokens - self._num_tokens

    def write(self, token_ids: Sequence[int]) -> OutputStep:
        """Takes tokens up to the one that ends the output; those after it are discarded."""
        texts: list[str] = []
        detokenizer, end_token_ids = self._detokenizer, self._end_token_ids
        finish_reason: FinishReason | None = None
        for token_id in token_ids:
            self._num_tokens += 1
            if token_id in end_token_ids:
                # The end token has no text of its own, but text held back in case a stop string began is now final.
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
