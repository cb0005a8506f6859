"""The backend `vllm`: the top tokens of each position from vLLM's tokens-in, tokens-out endpoint.

A round is one request whose prompt is the committed tokens and the draft tokens. `prompt_logprobs` states the top
tokens at each draft position, and `logprobs` those after the last one. vLLM batches the requests of all sessions by
itself and finds the KV of the committed tokens in its prefix cache.

Rows of positions that came from the prefix cache are not computed: vLLM leaves what its memory held before. Which ones
is known from the number of cached tokens, so the server must report it. They occur if a round is repeated or another
session has the same text. Such rows, and those whose top tokens do not decide the distribution (`top_distributions`),
are asked for one by one: the top tokens after a prefix, or a token that vLLM samples there (`contract.sampled`). Where
the memory held numbers that JSON does not have, vLLM refuses the request, and all of its rows are asked for one by one.

vLLM returns a row for every token of the prompt. With a long prompt each row is therefore a request of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from specdec.contract.errors import Internal
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import TokenIds
from specdec.engine.remote.completions import (
    context_tokens,
    listed_model,
    require_tokenizer_of,
    sampling_options,
    unsuited,
)
from specdec.engine.remote.http_connection import Connection, Refused
from specdec.engine.remote.pinned_model import PinnedModel, pin
from specdec.engine.remote.remote_model import fingerprint_of, read_model_files, require_token_ids
from specdec.settings.adapter_specs import AdapterSpec
from target_service.backends.adapters import Adapters, Served, open_adapters
from target_service.backends.contract import (
    PENALTIES,
    Answer,
    BackendShape,
    Distribution,
    RowsRequest,
    TopTokens,
    sampled,
)
from target_service.backends.filtered_distributions import distribution_of, may_decide, num_wanted
from target_service.backends.vllm_server import (
    GENERATE,
    cached_tokens,
    check_cache,
    check_distributions,
    choice_of,
    find_max_logprobs,
    generate_body,
    greedy_tokens,
    has_row_of,
    require_endpoint,
    top_of_output,
    top_of_prompt_row,
)

#: Largest number of logprobs that a request may ask for.
_MAX_LOGPROBS = 20

#: Largest number of logprobs in an answer's rows of the prompt; vLLM takes about 10 ms to write as many.
_MAX_ENTRIES = 20_000


class VllmBackend:
    """Implements `contract.Backend` with the top tokens of a server. Make one with `open_vllm`.

    The top tokens of each row decide distributions (`top_distributions`). If the filters keep more tokens than the
    server states, or the bounds do not decide, the server samples the token.
    """

    def __init__(self, base: PinnedModel, adapters: Adapters, shape: BackendShape, max_logprobs: int) -> None:
        """`max_logprobs` is the largest number of top tokens that the server states."""
        self.shape = shape
        self._base = base
        self._adapters = adapters
        self._max_logprobs = max_logprobs

    @property
    def adapters(self) -> dict[str, str]:
        """Names of the server's adapters by fingerprint."""
        return self._adapters.names

    async def ask(self, rows_request: RowsRequest) -> Answer:
        """Return the distributions of a request for rows; see `Backend.ask`."""
        num_masked = len(rows_request.filters.end_token_ids) if rows_request.masks_end(0) else 0
        num_top = max(num_wanted(rows_request.filters, num_masked, self._max_logprobs), rows_request.num_logprobs or 0)
        filters = rows_request.filters
        # Engines apply min-p before top-p, and the protocol after it: with both, the engine's own order decides.
        has_both = not filters.is_greedy and filters.top_p < 1.0 and filters.min_p > 0.0
        if has_both or not may_decide(filters, num_top, self.shape.vocabulary_size):
            samples = await asyncio.gather(*(self._sample(rows_request, row) for row in range(rows_request.num_rows)))
            return Answer([distribution for distribution, _ in samples], num_cached_tokens=samples[0][1])
        tops, num_cached_tokens = await self._ask_tops(rows_request, num_top)
        lost = [row for row, top in enumerate(tops) if top is None]
        asked_again = await asyncio.gather(*(self._ask_row(rows_request, row, num_top) for row in lost))
        for row, top in zip(lost, asked_again, strict=True):
            tops[row] = top
        distributions = [self._distribution(rows_request, row, top) for row, top in enumerate(tops) if top is not None]
        undecided = [row for row, distribution in enumerate(distributions) if distribution is None]
        sampled_distributions = await asyncio.gather(*(self._sample(rows_request, row) for row in undecided))
        for row, (distribution, _) in zip(undecided, sampled_distributions, strict=True):
            distributions[row] = distribution
        return Answer(
            [distribution for distribution in distributions if distribution is not None],
            num_cached_tokens=num_cached_tokens,
            num_reasked_rows=len(lost) + len(undecided),
            num_lost_rows=len(lost),
        )

    def forget(self, session_ids: Sequence[str]) -> None:
        """Do nothing: the server finds cached prefixes by itself."""

    async def wait_changed(self) -> None:
        """Raise Internal once the server serves another model."""
        await self._base.wait_changed()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._adapters.close()
        await self._base.connection.close()

    def _distribution(self, rows_request: RowsRequest, row: int, top: TopTokens) -> Distribution | None:
        masked = rows_request.filters.end_token_ids if rows_request.masks_end(row) else ()
        return distribution_of(top, self.shape.vocabulary_size, rows_request.filters, masked)

    async def _ask_tops(self, rows_request: RowsRequest, num_top: int) -> tuple[list[TopTokens | None], int]:
        """Return the top tokens of each row, None for rows that are lost, and the number of cached tokens."""
        num_draft_tokens = rows_request.num_rows - 1
        if num_draft_tokens and len(rows_request.token_ids) * (num_top + 1) > _MAX_ENTRIES:
            rows = range(rows_request.num_rows)
            return list(await asyncio.gather(*(self._ask_row(rows_request, row, num_top) for row in rows))), 0
        options = {"logprobs": num_top, "temperature": 0.0}
        if num_draft_tokens:
            options["prompt_logprobs"] = num_top
        try:
            answer = await self._send(rows_request, rows_request.token_ids, options)
        except Refused as refusal:
            if not num_draft_tokens:
                raise _refused(refusal) from refusal
            return [None] * rows_request.num_rows, 0  # a row of a cached position may hold what JSON cannot
        num_cached_tokens = cached_tokens(answer)
        first = len(rows_request.token_ids) - num_draft_tokens
        tops: list[TopTokens | None] = [
            # The row of a token is computed with the token before it, and states the token itself.
            top_of_prompt_row(answer, at, num_top)
            if at > num_cached_tokens and has_row_of(answer, at, token_id)
            else None
            for at, token_id in enumerate(rows_request.token_ids.tolist()[first:], first)
        ]
        return [*tops, top_of_output(answer, num_top)], num_cached_tokens

    async def _ask_row(self, rows_request: RowsRequest, row: int, num_top: int) -> TopTokens:
        """Return the top tokens of one row, asked for after its prefix."""
        options = {"logprobs": num_top, "temperature": 0.0}
        return top_of_output(await self._generate(rows_request, rows_request.prefixes[row], options), num_top)

    async def _sample(self, rows_request: RowsRequest, row: int) -> tuple[Distribution, int]:
        """Let vLLM sample the token of a row; return its distribution and the number of cached tokens."""
        options = sampling_options(rows_request.filters, masks_end=rows_request.masks_end(row))
        options["seed"] = rows_request.seed_at(row)
        if rows_request.num_logprobs is not None:
            options["logprobs"] = rows_request.num_logprobs
        answer = await self._generate(rows_request, rows_request.prefixes[row], options)
        distribution = sampled(choice_of(answer)["token_ids"][0])
        if rows_request.num_logprobs is not None:
            distribution = Distribution(
                distribution.token_ids, distribution.probabilities, top_of_output(answer, rows_request.num_logprobs + 1)
            )
        return distribution, cached_tokens(answer)

    async def _generate(self, rows_request: RowsRequest, token_ids: TokenIds, options: Mapping[str, Any]) -> Any:
        try:
            return await self._send(rows_request, token_ids, options)
        except Refused as refusal:
            raise _refused(refusal) from refusal

    async def _send(self, rows_request: RowsRequest, token_ids: TokenIds, options: Mapping[str, Any]) -> Any:
        body = generate_body(token_ids.tolist(), options)
        if salt := _cache_salt(rows_request):
            body["cache_salt"] = salt
        with self._adapters.asking(rows_request.model) as model:
            return await model.ask(GENERATE, body)


def _cache_salt(rows_request: RowsRequest) -> str:
    """Return what keeps a request's prefixes apart in vLLM's cache; "" for those of the default tenant's base model.

    A tenant must not find another one's text there. An adapter must not find the KV of one that had its name before.
    """
    tenant, adapter = rows_request.position.tenant, rows_request.model
    parts = [f"tenant {tenant}"] if tenant != DEFAULT_TENANT else []
    parts += [f"adapter {adapter}"] if adapter else []
    return " ".join(["specdec", *parts]) if parts else ""


def _refused(refusal: Refused) -> Internal:
    return Internal(f"the engine refused a round with status {refusal.status}")


async def open_vllm(
    connection: Connection,
    *,
    model: str,
    served_name: str,
    max_context_tokens: int | None,
    adapters: Sequence[AdapterSpec] = (),
) -> VllmBackend:
    """Check a vLLM server and return its backend. The arguments and errors are those of `open_server`."""
    files = read_model_files(model)
    listed = await listed_model(connection, served_name)
    name = str(listed["id"])
    version = await require_endpoint(connection, name)

    continue_greedily = partial(greedy_tokens, connection, name)
    require_token_ids(await continue_greedily([0]), files, connection.url)
    try:
        await require_tokenizer_of(connection, model, name, files.vocabulary_size)
    except (Refused, Internal) as error:
        raise unsuited(connection, f"does not complete token ids at /v1/completions: {error}") from error
    max_logprobs = min(await find_max_logprobs(connection, name), files.vocabulary_size)
    await check_cache(connection, name, files.vocabulary_size)
    await check_distributions(connection, name, files.vocabulary_size)
    base = await pin(connection, name, lambda: fingerprint_of(files, name, continue_greedily))
    shape = BackendShape(
        backend="vllm",
        engine=f"vLLM {version} {connection.url}",
        vocabulary_size=files.vocabulary_size,
        vocabulary_fingerprint=files.vocabulary_fingerprint,
        model_fingerprint=base.fingerprint,
        max_context_tokens=context_tokens(files, listed, max_context_tokens),
        eos_token_ids=files.eos_token_ids,
        unsupported_fields=PENALTIES if max_logprobs >= _MAX_LOGPROBS else (*PENALTIES, "sampling.logprobs"),
    )
    served = Served(base, files, model, partial(partial, greedy_tokens, connection))
    return VllmBackend(base, await open_adapters(served, adapters), shape, max_logprobs)
