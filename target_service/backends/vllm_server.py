"""A vLLM server's requests and answers, and the checks of the server before a replica serves with it.

The endpoint is vLLM's tokens-in, tokens-out interface. Each refusal names the flag to change. Called by
`vllm_backend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec.contract.errors import Internal
from specdec.engine.remote.completions import unsuited
from specdec.engine.remote.http_connection import Connection, Refused
from specdec.engine.remote.remote_model import NUM_PROBED_TOKENS
from target_service.backends.contract import TopTokens

GENERATE = "/inference/v1/generate"

#: What the server has to be started with.
FLAGS = "start vLLM with --enable-scale-out --enable-prompt-tokens-details"


def generate_body(token_ids: Sequence[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body, but for the model, of a request that generates one token, unless `options` say otherwise."""
    params = {"max_tokens": 1, "detokenize": False, "skip_reading_prefix_cache": False, **options}
    return {"token_ids": list(token_ids), "sampling_params": params}


async def generate(connection: Connection, name: str, token_ids: Sequence[int], options: Mapping[str, Any]) -> Any:
    """Return the server's answer to a request to the model of a name. Raises as `Connection.ask`."""
    return await connection.ask(GENERATE, {"model": name, **generate_body(token_ids, options)})


async def greedy_tokens(connection: Connection, name: str, prompt: Sequence[int]) -> Sequence[int]:
    """Return the greedy tokens of a model after a prompt (`remote_model.Continue`). Raises as `Connection.ask`."""
    options = {"max_tokens": NUM_PROBED_TOKENS, "temperature": 0.0, "ignore_eos": True}
    return list(choice_of(await generate(connection, name, prompt, options))["token_ids"])


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


#: Numbers of logprobs that are tried at the start, up to the first that the server refuses.
_NUMS_LOGPROBS = (1, 5, 10, 20, 50, 64, 100, 128, 256, 512, 1024)

#: Longer than a block of vLLM's prefix cache: 16 tokens on a GPU, 128 on a CPU, several hundred for hybrid models.
_CACHED_PROMPTS_TOKENS = (20, 260, 2100)

#: Difference between the logprobs of one position, asked for in two ways, that is put down to rounding in 16 bits.
_MAX_DIFFERENCE = 0.25


async def require_endpoint(connection: Connection, name: str) -> str:
    """Return the server's version.

    Raises:
        InvalidSetting: the server lacks the endpoint, or speculates itself.
        Unavailable: the server cannot be reached. The other checks raise these errors, too.
    """
    try:
        version = str((await connection.ask("/version"))["version"])
        await generate(connection, name, [0], {})
        metrics = await connection.ask_text("/metrics")
    except (Refused, Internal, KeyError, TypeError) as error:
        raise unsuited(connection, f"has no {GENERATE}: {FLAGS}, version 0.32 or newer") from error
    if "vllm:spec_decode" in metrics:
        raise unsuited(connection, "speculates itself: start vLLM without --speculative-config")
    return version


async def find_max_logprobs(connection: Connection, name: str) -> int:
    """Return the largest number of logprobs, up to 1024, that the server's --max-logprobs is known to allow."""
    largest = 0
    for num in _NUMS_LOGPROBS:
        try:
            await generate(connection, name, [0], {"logprobs": num})
        except Refused:
            break
        largest = num
    if not largest:
        raise unsuited(connection, "returns no logprobs: start vLLM with --max-logprobs 20")
    return largest


async def check_cache(connection: Connection, name: str, vocabulary_size: int) -> None:
    """Require that the server reports cached tokens and has a prefix cache."""
    num_tried = 0
    for num_tokens in _CACHED_PROMPTS_TOKENS:
        prompt = _prompt(num_tokens, vocabulary_size)
        try:
            answers = [await generate(connection, name, prompt, {}) for _ in range(2)]
            if cached_tokens(answers[-1]):
                return
        except Internal as error:
            raise unsuited(connection, error.message) from error
        except Refused:  # its context is too short for a longer check
            break
        num_tried = num_tokens
    raise unsuited(
        connection,
        f"keeps no KV of {num_tried} tokens between rounds: start vLLM with --enable-prefix-caching, and with a "
        "--block-size below its context",
    )


async def check_distributions(connection: Connection, name: str, vocabulary_size: int) -> None:
    """Require that the two ways of asking for a position agree, and that they state raw probabilities."""
    prompt, options = _prompt(24, vocabulary_size), {"logprobs": 1, "prompt_logprobs": 1, "temperature": 0.0}
    try:
        whole = await generate(connection, name, prompt, {**options, "skip_reading_prefix_cache": True})
        for at in (8, 16, 23):
            part = await generate(connection, name, prompt[:at], {"logprobs": 1, "temperature": 0.0})
            alone, beside = top_of_output(part, 1), top_of_prompt_row(whole, at, 1)
            is_equal = np.abs(alone.logits - beside.logits).max() <= _MAX_DIFFERENCE
            if not is_equal:
                raise unsuited(connection, "states other logprobs of a prompt than of its output")
    except (Refused, Internal) as error:
        raise unsuited(connection, f"{error}: start vLLM with --logprobs-mode raw_logprobs") from error


def _prompt(num_tokens: int, vocabulary_size: int) -> list[int]:
    return [(31 * place + 17) % vocabulary_size for place in range(num_tokens)]
