"""Completions of token ids by OpenAI-style servers: models, sampling options and answers.

Called by the backends of targets and by drafts of such servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specdec.contract.errors import Internal, InvalidSetting, SpecdecError
from specdec.contract.types import SamplingFilters
from specdec.engine.remote.http_connection import Connection, Refused
from specdec.engine.remote.pinned_model import PinnedModel, pin
from specdec.engine.remote.remote_model import (
    NUM_PROBED_TOKENS,
    ModelFiles,
    fingerprint_of,
    probes,
    read_model_files,
    require_same_texts,
    require_token_ids,
)

_COMPLETIONS = "/v1/completions"

#: A server may take other defaults from the checkpoint's generation_config.json.
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True, slots=True)
class CompletionServer:
    """A server that completes prompts of token ids with one model."""

    model: PinnedModel
    files: ModelFiles
    max_context_tokens: int

    async def complete(
        self,
        prompts: Sequence[Sequence[int]],
        options: Mapping[str, Any],
        max_tokens: int = 1,
        *,
        model: PinnedModel | None = None,
    ) -> list[list[int]]:
        """Return the completion of each prompt.

        Args:
            prompts: token ids.
            options: see `sampling_options`; `seed` as well.
            max_tokens: length of each completion, unless an end token ends it.
            model: the model with an adapter; None: the model itself.

        Raises:
            Unavailable: the server cannot be reached or does not answer.
            Internal: it refuses the request, answers without token ids, or serves another model now.
        """
        body = {"prompt": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "return_token_ids": True}
        try:
            answer = await (model or self.model).ask(_COMPLETIONS, {**body, **_NO_PENALTIES, **options})
        except Refused as refusal:
            raise Internal(f"the engine refused a completion with status {refusal.status}") from refusal
        return completed_ids(answer, len(prompts))


async def open_completions(
    connection: Connection, *, model: str, served_name: str, max_context_tokens: int | None
) -> CompletionServer:
    """Check a server of completions and pin its model.

    Args:
        connection: connections to the server, which then belong to the result.
        model: checkpoint with the tokenizer of the server's model.
        served_name: name by which the server knows the model; "" for the first that it lists.
        max_context_tokens: longest session; None for the server's or the model's own limit.

    Raises:
        InvalidSetting: the server is not suited; the message names the flag to change.
        Unavailable: the server cannot be reached.
    """
    files = read_model_files(model)
    listed = await listed_model(connection, served_name)
    name = str(listed["id"])

    continue_greedily = partial(greedy_completion, connection, name)
    try:
        for token_id in (0, files.vocabulary_size - 1):
            require_token_ids(await continue_greedily([token_id]), files, connection.url)
        pinned = await pin(connection, name, lambda: fingerprint_of(files, name, continue_greedily))
        await require_tokenizer_of(connection, model, name, files.vocabulary_size)
    except Refused as refusal:
        raise unsuited(connection, f"refuses completions of token ids: {refusal.message}") from refusal
    except Internal as error:
        raise unsuited(connection, error.message) from error
    limit = context_tokens(files, listed, max_context_tokens)
    return CompletionServer(pinned, files, limit)


async def greedy_completion(connection: Connection, name: str, prompt: Sequence[int]) -> Sequence[int]:
    """Return the greedy tokens of a model after a prompt (`remote_model.Continue`). Raises as `Connection.ask`."""
    body = {"model": name, "prompt": [list(prompt)], "max_tokens": NUM_PROBED_TOKENS, "temperature": 0}
    answer = await connection.ask(_COMPLETIONS, {**body, **_NO_PENALTIES, "return_token_ids": True, "ignore_eos": True})
    return completed_ids(answer, 1)[0]


async def require_tokenizer_of(connection: Connection, model: str, name: str, vocabulary_size: int) -> None:
    """Compare texts of a server's completions with the tokenizer of --model, as `require_same_texts`.

    Raises:
        InvalidSetting: see there.
        Refused, Unavailable, Internal: as `Connection.ask`.
    """
    prompts = probes(vocabulary_size)
    body = {"model": name, "prompt": prompts, "max_tokens": NUM_PROBED_TOKENS, "temperature": 0}
    answer = await connection.ask(_COMPLETIONS, {**body, **_NO_PENALTIES, "return_token_ids": True})
    chosen = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    texts = [str(choice.get("text") or "") for choice in chosen]
    written = list(zip(completed_ids(answer, len(prompts)), texts, strict=True))
    require_same_texts(model, written, connection.url)


async def listed_model(connection: Connection, served_name: str) -> Mapping[str, Any]:
    """Return a server's description of the named model, or for "" of the first one that has no parent.

    Raises:
        InvalidSetting: the server lists no model, or not this one.
        InvalidSetting, Unavailable: as `listed_models`.
    """
    listed = await listed_models(connection)
    names = [str(model["id"]) for model in listed]
    if not names or (served_name and served_name not in names):
        raise InvalidSetting(
            f"backend_model: {connection.url} serves {', '.join(names) or 'no model'}, not {served_name!r}",
            field="backend_model",
        )
    first = next((model for model in listed if not model.get("parent")), listed[0])
    found: Mapping[str, Any] = listed[names.index(served_name)] if served_name else first
    if found.get("owned_by") == "specdec":
        raise unsuited(connection, "is a gateway of specdec; name the server of the engine")
    return found


async def listed_models(connection: Connection) -> list[Mapping[str, Any]]:
    """Return a server's descriptions of its models and adapters; each has an "id".

    Raises:
        InvalidSetting: the server does not list models, or refuses the key.
        Unavailable: the server cannot be reached.
    """
    try:
        listed: list[Mapping[str, Any]] = (await connection.ask("/v1/models"))["data"]
        if not all(isinstance(model["id"], str) for model in listed):
            raise TypeError("the id of a model must be a text")
        return listed
    except Refused as refusal:
        if refusal.status in (401, 403):
            raise InvalidSetting(
                f"backend_key: {connection.url} refuses the key: {refusal.message}", field="backend_key"
            ) from refusal
        raise unsuited(connection, f"lists no models: {refusal.message}") from refusal
    except (Internal, KeyError, TypeError) as error:
        raise unsuited(connection, "lists no models at /v1/models; is it an OpenAI-style server?") from error


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
