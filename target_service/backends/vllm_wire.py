"""Requests and answers of vLLM's tokens-in, tokens-out endpoint. Called by `vllm_backend` and `vllm_checks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec.contract.errors import Internal
from target_service.backends.contract import TopTokens

GENERATE = "/inference/v1/generate"

#: What the server has to be started with.
FLAGS = "start vLLM with --enable-scale-out --enable-prompt-tokens-details"


def generate_body(model: str, token_ids: Sequence[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a request that generates one token, unless `options` say otherwise."""
    params = {"max_tokens": 1, "detokenize": False, "skip_reading_prefix_cache": False, **options}
    return {"model": model, "token_ids": list(token_ids), "sampling_params": params}


def cached_tokens(answer: Any) -> int:
    """Return how many tokens of the prompt came from the prefix cache. Raises Internal if the answer does not say."""
    try:
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    except (KeyError, TypeError) as error:
        raise Internal(f"vLLM does not report cached tokens: {FLAGS}") from error


def has_row_of(answer: Any, at: int, token_id: int) -> bool:
    """Return whether the row of prompt token `at` is that of this token."""
    try:
        return str(token_id) in answer["prompt_logprobs"][at]
    except (KeyError, IndexError, TypeError) as error:
        raise Internal(f"vLLM returned no logprobs of prompt token {at}") from error


def top_of_prompt_row(answer: Any, at: int, num_top: int) -> TopTokens:
    """Return the top tokens of the position of prompt token `at`, from the answer's `prompt_logprobs`."""
    try:
        row = answer["prompt_logprobs"][at]
        entries = [(int(token_id), float(entry["logprob"]), int(entry["rank"])) for token_id, entry in row.items()]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Internal(f"vLLM returned no logprobs of prompt token {at}") from error
    if min((rank for _, _, rank in entries), default=0) != 1:
        raise Internal(f"vLLM returned logprobs of prompt token {at} without the most probable token")
    return _top_tokens([(token_id, logprob) for token_id, logprob, rank in entries if rank <= num_top], num_top)


def top_of_output(answer: Any, num_top: int) -> TopTokens:
    """Return the top tokens of the generated position, from the answer's `logprobs`."""
    try:
        row = choice_of(answer)["logprobs"]["content"][0]
        entries = {int(entry["token_id"]): float(entry["logprob"]) for entry in [row, *row["top_logprobs"]]}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Internal("vLLM returned no logprobs of its token") from error
    return _top_tokens(list(entries.items()), num_top)


def _top_tokens(entries: Sequence[tuple[int, float]], num_top: int) -> TopTokens:
    ordered = sorted(entries, key=lambda entry: (-entry[1], entry[0]))[:num_top]
    token_ids = np.array([token_id for token_id, _ in ordered], dtype=np.int64)
    logits = np.array([logprob for _, logprob in ordered])
    is_valid = len(ordered) > 0 and np.isfinite(logits[0]) and not np.isnan(logits).any()
    if not is_valid or token_ids.min() < 0 or token_ids.max() >= 1 << 32 or np.exp(logits).sum() > 1.001:
        raise Internal("vLLM returned logprobs that do not form a distribution")
    return TopTokens(token_ids.astype(np.uint32), logits, 0.0)


def choice_of(answer: Any) -> Mapping[str, Any]:
    try:
        choice: Mapping[str, Any] = answer["choices"][0]
    except (KeyError, IndexError, TypeError) as error:
        raise Internal("vLLM returned no token") from error
    return choice
