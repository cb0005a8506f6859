"""Checks of a vLLM server before a replica serves with it: each refusal names the flag to change.

Called by `vllm_backend.open_vllm`.
"""

from __future__ import annotations

import numpy as np

from specdec.contract.errors import Internal
from specdec.engine.remote.completions import unsuited
from specdec.engine.remote.http_connection import Connection, Refused
from target_service.backends.vllm_wire import (
    FLAGS,
    GENERATE,
    cached_tokens,
    generate_body,
    top_of_output,
    top_of_prompt_row,
)

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
        await connection.ask(GENERATE, generate_body(name, [0], {}))
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
            await connection.ask(GENERATE, generate_body(name, [0], {"logprobs": num}))
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
            answers = [await connection.ask(GENERATE, generate_body(name, prompt, {})) for _ in range(2)]
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
        whole = await connection.ask(
            GENERATE, generate_body(name, prompt, {**options, "skip_reading_prefix_cache": True})
        )
        for at in (8, 16, 23):
            part = await connection.ask(GENERATE, generate_body(name, prompt[:at], {"logprobs": 1, "temperature": 0.0}))
            alone, beside = top_of_output(part, 1), top_of_prompt_row(whole, at, 1)
            is_equal = np.abs(alone.logits - beside.logits).max() <= _MAX_DIFFERENCE
            if not is_equal:
                raise unsuited(connection, "states other logprobs of a prompt than of its output")
    except (Refused, Internal) as error:
        raise unsuited(connection, f"{error}: start vLLM with --logprobs-mode raw_logprobs") from error


def _prompt(num_tokens: int, vocabulary_size: int) -> list[int]:
    return [(31 * place + 17) % vocabulary_size for place in range(num_tokens)]
