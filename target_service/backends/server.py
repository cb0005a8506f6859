"""The backend `server`: any OpenAI-style server of completions that takes and returns token ids.

The server samples one token after each of L + 1 prompts: the committed tokens, the committed tokens with the first
draft token, and so on. Each sample is the distribution of its position (`contract.sampled`), so the output is exactly
the server's own for every sampler that it applies to one token, quantisation and adapters included. Penalties on
earlier tokens are left out: the server would count the output so far as prompt.

Greedy rounds are one call with all prompts. Sampled positions need a call each, because a seed belongs to a call: with
one seed, the samples of neighbouring positions would depend on each other. The seed of a position follows from the
request's seed, turn and the absolute position, so a repeated round gets the same samples.

The other backends are tested against this one, and `vllm` asks such questions if top tokens do not decide.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from specdec.engine.remote.completions import (
    CompletionServer,
    greedy_completion,
    open_completions,
    sampling_options,
)
from specdec.engine.remote.http_connection import Connection
from specdec.engine.remote.pinned_model import PinnedModel
from specdec.engine.remote.remote_model import NUM_PROBED_TOKENS
from specdec.settings.adapter_specs import AdapterSpec
from target_service.backends.adapters import Adapters, Served, open_adapters
from target_service.backends.contract import PENALTIES, Answer, BackendShape, RowsRequest, sampled

_log = logging.getLogger(__name__)

#: Number of tokens that are sampled to see whether a server applies a filter.
_NUM_ATTEMPTS = 8

#: Largest temperature that vLLM takes.
_MAX_TEMPERATURE = 2.0


class ServerBackend:
    """Implements `contract.Backend` with sampled tokens."""

    def __init__(self, server: CompletionServer, ignored: Sequence[str], adapters: Adapters) -> None:
        """`ignored` names fields of requests that the server does not apply."""
        self._server = server
        self._adapters = adapters
        self.shape = BackendShape(
            backend="server",
            engine=f"server {server.model.connection.url}",
            vocabulary_size=server.files.vocabulary_size,
            vocabulary_fingerprint=server.files.vocabulary_fingerprint,
            model_fingerprint=server.model.fingerprint,
            max_context_tokens=server.max_context_tokens,
            eos_token_ids=server.files.eos_token_ids,
            unsupported_fields=(*PENALTIES, "sampling.logprobs", *ignored),
        )

    @property
    def adapters(self) -> dict[str, str]:
        """Names of the server's adapters by fingerprint."""
        return self._adapters.names

    async def ask(self, rows_request: RowsRequest) -> Answer:
        """Let the server sample a token at each position; see `Backend.ask`."""
        with self._adapters.asking(rows_request.model) as model:
            return Answer([sampled(token_ids[0]) for token_ids in await self._sample(rows_request, model)])

    async def _sample(self, rows_request: RowsRequest, model: PinnedModel) -> list[list[int]]:
        prompts = [prefix.tolist() for prefix in rows_request.prefixes]
        options = [
            sampling_options(rows_request.filters, masks_end=rows_request.masks_end(row)) for row in range(len(prompts))
        ]
        if rows_request.filters.is_greedy and options[0] == options[-1]:
            return await self._server.complete(prompts, options[0], model=model)
        calls = [
            self._server.complete([prompt], {**option, "seed": rows_request.seed_at(row)}, model=model)
            for row, (prompt, option) in enumerate(zip(prompts, options, strict=True))
        ]
        return [answer for completed in await asyncio.gather(*calls) for answer in completed]

    def forget(self, session_ids: Sequence[str]) -> None:
        """Do nothing: the server finds cached prefixes by itself."""

    async def wait_changed(self) -> None:
        """Raise Internal once the server serves another model."""
        await self._server.model.wait_changed()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._adapters.close()
        await self._server.model.connection.close()


async def open_server(
    connection: Connection,
    *,
    model: str,
    served_name: str,
    max_context_tokens: int | None,
    adapters: Sequence[AdapterSpec] = (),
) -> ServerBackend:
    """Check a server and return its backend.

    Args:
        connection, model, served_name, max_context_tokens: as for `open_completions`, whose errors are raised too.
        adapters: those to serve; empty for all that the server lists.
    """
    server = await open_completions(
        connection, model=model, served_name=served_name, max_context_tokens=max_context_tokens
    )
    ignored = await _ignored_fields(server)
    if not await _heeds_seeds(server):
        _log.warning("%s ignores seeds: sampled requests with a seed are refused", connection.url)
        ignored.append("sampling.seed")
    base = Served(server.model, server.files, model, partial(partial, greedy_completion, connection))
    return ServerBackend(server, ignored, await open_adapters(base, adapters))


async def _heeds_seeds(server: CompletionServer) -> bool:
    """Return whether equal seeds give equal samples."""
    prompt = [server.files.vocabulary_size // 2]
    options = {"temperature": 1.0, "ignore_eos": True, "seed": 1}
    first, second = [await server.complete([prompt], options, NUM_PROBED_TOKENS) for _ in range(2)]
    return first == second


async def _ignored_fields(server: CompletionServer) -> list[str]:
    """Return the fields that the server ignores: with each of them one token alone can follow, or cannot.

    At a high temperature a server that ignores a filter seldom samples the most probable token in all attempts.
    """
    prompt = [server.files.vocabulary_size // 2]
    ((top,),) = await server.complete([prompt], {"temperature": 0.0, "ignore_eos": True})
    ignored = []
    for field, value in {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}.items():
        drawn = {"temperature": _MAX_TEMPERATURE, "ignore_eos": True, field: value}
        samples = await asyncio.gather(
            *(server.complete([prompt], {**drawn, "seed": seed}) for seed in range(_NUM_ATTEMPTS))
        )
        if any(sample != [[top]] for sample in samples):
            ignored.append(f"sampling.{field}")
    masked = {"temperature": 0.0, "min_tokens": 1, "stop_token_ids": [top], "ignore_eos": False}
    if await server.complete([prompt], masked) == [[top]]:
        ignored.append("sampling.min_new_tokens")
    return ignored
