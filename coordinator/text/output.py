"""Turns the tokens of a request's rounds into output: text per token, and the token that ends the output.

Tokens come from `generation/generation`, and their text from `detokenizer`; `output_parts` divides it. The output goes
back to the generation, and then to `generation/publisher`. Text is produced token by token, so the text after n tokens
depends on those n tokens alone, and a replay from the log gives the same text however the rounds were cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.text.detokenizer import IncrementalDetokenizer
from coordinator.text.output_parts import OutputParts
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.tools import AnswerText, OutputPart
from specdec.contract.types import FinishReason, SamplingParams


class OutputStep(NamedTuple):
    """Output tokens of one round."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """Text of the answer that each token completed."""
    finish_reason: FinishReason | None
    parts: tuple[tuple[OutputPart, ...], ...] = ()
    """Parts that each token completed, of an output with a form; empty for any other."""


class OutputWriter:
    """Takes decided tokens until one of them ends the output. One object writes one output."""

    def __init__(
        self,
        tokenizer: ServedTokenizer,
        sampling: SamplingParams,
        eos_token_ids: Sequence[int],
        before: Sequence[int] = (),
        parts: OutputParts | None = None,
    ) -> None:
        """
        Args:
            tokenizer: tokenizer of the target model.
            sampling: resolved parameters; `max_new_tokens` is above 0.
            eos_token_ids: end tokens of the target model.
            before: tokens of the text that the output continues; empty if the output begins a text.
            parts: divides the output into its parts; None: all of it is the answer.
        """
        self._parts = parts
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

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of output tokens up to the end of the reasoning, its marks included."""
        return 0 if self._parts is None else self._parts.num_reasoning_tokens

    def write(self, token_ids: Sequence[int]) -> OutputStep:
        """Take tokens up to the one that ends the output, and discard those after it."""
        texts: list[str] = []
        parts: list[tuple[OutputPart, ...]] = []
        finish_reason: FinishReason | None = None
        for token_id in token_ids:
            text, finish_reason = self._take(token_id)
            if self._parts is not None:
                new_parts = self._parts.take(text, token_id, is_last=finish_reason is not None)
                parts.append(tuple(new_parts))
                text = "".join(part.text for part in new_parts if isinstance(part, AnswerText))
            texts.append(text)
            if finish_reason is not None:
                break
        if finish_reason is FinishReason.STOP and self._parts is not None and self._parts.has_call:
            finish_reason = FinishReason.TOOL_CALLS
        return OutputStep(tuple(token_ids[: len(texts)]), tuple(texts), finish_reason, tuple(parts))

    def _take(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Take one token; return the text that is final now, and the reason if the output ends."""
        self._num_tokens += 1
        detokenizer = self._detokenizer
        if token_id in self.end_token_ids:
            # An end token has no text, but it makes text final that was held back as the start of a stop string.
            return detokenizer.finish(), FinishReason.STOP
        if self._parts is not None and token_id in self._parts.markers:
            text = detokenizer.flush()
        else:
            text = detokenizer.push_token(token_id)
        if detokenizer.has_ended:
            return text, FinishReason.STOP_STRING
        if self._num_tokens == self._max_new_tokens:
            return text + detokenizer.finish(), FinishReason.LENGTH
        return text, None
