"""The backend `server`: any OpenAI-style server of completions that takes and returns token ids.

The server samples one token after each of L + 1 prompts: the committed tokens, the committed tokens with the first
draft token, and so on. Each sample is the law of its position (`contract.sampled`), so the output is exactly the
server's own for every sampler that it applies to one token, quantisation and adapters included. Penalties on earlier
tokens are left out: the server would count the output so far as prompt.

Greedy rounds are one call with all prompts. Sampled positions need a call each, because a seed belongs to a call: with
one seed, the samples of neighbouring positions would depend on each other. The seed of a position follows from the
request's seed, turn and the absolute position, so a repeated round gets the same samples.

The other backends are tested against this one, and `vllm` asks such questions where top tokens do not decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.core.random import DrawKey, Stream
from specdec.errors import Internal, InvalidSetting, SpecdecError
from specdec.types import SamplingFilters
from target_service.backends.connection import Connection, Refused
from target_service.backends.contract import Answer, BackendShape, Question, sampled
from target_service.backends.remote_model import (
    NUM_PROBED_TOKENS,
    ModelFiles,
    fingerprint_of,
    read_model_files,
    require_token_ids,
)

_COMPLETIONS = "/v1/completions"

#: Fields of a request that no sampler of a single next token can serve.
PENALTIES = (
    "sampling.repetition_penalty",
    "sampling.presence_penalty",
    "sampling.frequency_penalty",
    "sampling.logit_bias",
)

#: Seeds of OpenAI-style servers are signed 32-bit integers at least.
_NUM_SEEDS = 1 << 31


class ServerBackend:
    """Implements `contract.Backend` with sampled tokens. Make one with `open_server`."""

    def __init__(self, connection: Connection, model: str, shape: BackendShape) -> None:
        self.shape = shape
        self._connection = connection
        self._model = model

    async def ask(self, question: Question) -> Answer:
        """Let the server sample a token at each position; see `Backend.ask`."""
        prompts = [prefix.tolist() for prefix in question.prefixes]
        options = [sampling_options(question.filters, masks_end=question.masks_end(row)) for row in range(len(prompts))]
        if question.filters.is_greedy and options[0] == options[-1]:
            token_ids = await self._complete(prompts, options[0])
        else:
            calls = [
                self._complete([prompt], {**option, "seed": seed_at(question, row)})
                for row, (prompt, option) in enumerate(zip(prompts, options, strict=True))
            ]
            token_ids = [token_id for answer in await asyncio.gather(*calls) for token_id in answer]
        return Answer([sampled(token_id) for token_id in token_ids])

    def forget(self, session_ids: Sequence[str]) -> None:
        """Do nothing: the server finds cached prefixes by itself."""

    async def wait_changed(self) -> None:
        """Raise Internal once the server serves another model."""
        await self._connection.wait_changed()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._connection.close()

    async def _complete(self, prompts: list[list[int]], options: Mapping[str, Any]) -> list[int]:
        body = {"model": self._model, "prompt": prompts, "max_tokens": 1, "return_token_ids": True, **options}
        try:
            answer = await self._connection.ask_pinned(_COMPLETIONS, body)
        except Refused as refusal:
            raise Internal(f"{self._connection.url} refused a completion: {refusal.message}") from refusal
        return [token_ids[0] for token_ids in completed_ids(answer, len(prompts))]


async def open_server(
    connection: Connection, *, model: str, served_name: str, max_context_tokens: int | None
) -> ServerBackend:
    """Check a server and return its backend.

    Args:
        connection: connections to the server, which then belong to the backend.
        model: checkpoint with the tokenizer of the server's model.
        served_name: name by which the server knows the model; "" for the first that it lists.
        max_context_tokens: longest session; None for the server's or the model's own limit.

    Raises:
        InvalidSetting: the server cannot be a target; the message names the flag to change.
        Unavailable: the server cannot be reached.
    """
    files = read_model_files(model)
    listed = await listed_model(connection, served_name)

    async def continue_greedily(prompt: Sequence[int]) -> Sequence[int]:
        body = {"model": listed["id"], "prompt": [list(prompt)], "max_tokens": NUM_PROBED_TOKENS, "temperature": 0}
        answer = await connection.ask(_COMPLETIONS, {**body, "return_token_ids": True, "ignore_eos": True})
        return completed_ids(answer, 1)[0]

    try:
        require_token_ids(await continue_greedily([0]), files, connection.url)
        fingerprint = await connection.pin(lambda: fingerprint_of(files, listed["id"], continue_greedily))
    except Refused as refusal:
        raise unsuited(connection, f"refuses completions of token ids: {refusal.message}") from refusal
    except Internal as error:
        raise unsuited(connection, error.message) from error
    shape = BackendShape(
        backend="server",
        engine=f"server {connection.url}",
        vocabulary_size=files.vocabulary_size,
        vocabulary_fingerprint=files.vocabulary_fingerprint,
        model_fingerprint=fingerprint,
        max_context_tokens=context_tokens(files, listed, max_context_tokens),
        eos_token_ids=files.eos_token_ids,
        unsupported_fields=(*PENALTIES, "sampling.logprobs"),
    )
    return ServerBackend(connection, listed["id"], shape)


async def listed_model(connection: Connection, served_name: str) -> Mapping[str, Any]:
    """Return a server's description of the named model, or of the first one for "".

    Raises:
        InvalidSetting: the server lists no model, or not this one, or refuses the key.
        Unavailable: the server cannot be reached.
    """
    try:
        listed = (await connection.ask("/v1/models"))["data"]
        names = [str(model["id"]) for model in listed]
    except Refused as refusal:
        if refusal.status in (401, 403):
            raise InvalidSetting(
                f"backend_key: {connection.url} refuses the key: {refusal.message}", field="backend_key"
            ) from refusal
        raise unsuited(connection, f"lists no models: {refusal.message}") from refusal
    except (Internal, KeyError, TypeError) as error:
        raise unsuited(connection, "lists no models at /v1/models; is it an OpenAI-style server?") from error
    if not names or (served_name and served_name not in names):
        raise InvalidSetting(
            f"backend_model: {connection.url} serves {', '.join(names) or 'no model'}, not {served_name!r}",
            field="backend_model",
        )
    found: Mapping[str, Any] = listed[names.index(served_name)] if served_name else listed[0]
    if found.get("owned_by") == "specdec":
        raise unsuited(connection, "is a gateway of specdec; name the server of the engine")
    return found


def unsuited(connection: Connection, problem: str) -> SpecdecError:
    """Return the error for a server that cannot be a target."""
    return InvalidSetting(f"backend_url: {connection.url} {problem}", field="backend_url")


def completed_ids(answer: Any, num_prompts: int) -> list[list[int]]:
    """Return the token ids of each completion in the order of the prompts.

    vLLM and SGLang return them as `token_ids`, llama.cpp as `logprobs.content[].id`.

    Raises:
        Internal: the server returned no token ids.
    """
    try:
        chosen = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        token_ids = [_ids_of_choice(choice) for choice in chosen]
    except (KeyError, TypeError, ValueError) as error:
        raise Internal("the server returns no token ids with completions") from error
    if len(token_ids) != num_prompts or not all(token_ids):
        raise Internal(f"the server returned {len(token_ids)} completions of {num_prompts} prompts, or empty ones")
    return token_ids


def _ids_of_choice(choice: Mapping[str, Any]) -> list[int]:
    if choice.get("token_ids") is not None:
        return [int(token_id) for token_id in choice["token_ids"]]
    return [int(entry["id"]) for entry in choice["logprobs"]["content"]]


def sampling_options(filters: SamplingFilters, *, masks_end: bool) -> dict[str, Any]:
    """Return the fields of a completion for one token with these filters, in vLLM's spelling."""
    options: dict[str, Any] = {"temperature": filters.temperature, "ignore_eos": not masks_end}
    if not filters.is_greedy:
        options |= {"top_p": filters.top_p, "top_k": filters.top_k or -1, "min_p": filters.min_p}
    if masks_end:
        options |= {"min_tokens": 1, "stop_token_ids": list(filters.end_token_ids)}
    return options


def seed_at(question: Question, row: int) -> int:
    """Return the seed of a position: a function of the request's seed, the turn and the absolute position."""
    position = question.position
    at = len(question.token_ids) - question.num_rows + 1 + row
    return DrawKey(position.seed, position.turn, at).below(_NUM_SEEDS, 0, Stream.TAIL)


def context_tokens(files: ModelFiles, listed: Mapping[str, Any], wanted: int | None) -> int:
    """Return the longest session: what is wanted, the server's limit or the model's, whichever is least."""
    limits = [wanted, listed.get("max_model_len"), (listed.get("meta") or {}).get("n_ctx"), files.max_context_tokens]
    known = [int(limit) for limit in limits if limit]
    if not known:
        raise InvalidSetting(
            "max_context_tokens: neither the server nor the model states its context; set --max-context-tokens",
            field="max_context_tokens",
        )
    return min(known)
