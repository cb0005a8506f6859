"""The backend `sglang`: the top tokens of each position from SGLang's native endpoint.

A round is one request whose prompt is the committed tokens and the draft tokens, with the logprobs of the prompt from
the last committed token on. SGLang reuses KV up to that token, and computes every row that is asked for.

The wire follows the sources of SGLang 0.5.23: `input_top_logprobs` has an entry for each token from
`logprob_start_len` on, the first of which is empty. The logprobs of a token that SGLang sampled have the temperature
and masked tokens in them, so raw ones are asked for greedily. Contract tests compare requests and answers with the
fields of these sources; the backend has not run with a real SGLang yet.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from specdec.contract.errors import Internal
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.contract.types import SamplingFilters, TokenIds
from specdec.engine.remote.completions import context_tokens, listed_model, unsuited
from specdec.engine.remote.connection import Connection, Refused
from specdec.engine.remote.remote_model import (
    NUM_PROBED_TOKENS,
    fingerprint_of,
    read_model_files,
    require_token_ids,
)
from target_service.backends.contract import BackendShape, Distribution, RowsRequest, TopTokens, sampled
from target_service.backends.top_backend import PENALTIES, TopBackend, seed_at

_log = logging.getLogger(__name__)

_GENERATE = "/generate"

_GREEDY = MappingProxyType({"temperature": 0.0})

#: Largest number of top tokens that is asked for; SGLang itself has no limit.
_MAX_LOGPROBS = 64


class SglangBackend(TopBackend):
    """Implements `contract.Backend`. Make one with `open_sglang`."""

    async def _ask_tops(self, rows_request: RowsRequest, num_top: int) -> tuple[list[TopTokens | None], int]:
        num_draft_tokens = rows_request.num_rows - 1
        first = len(rows_request.token_ids) - num_draft_tokens
        answer = await self._generate(rows_request, rows_request.token_ids, _GREEDY, _logprobs(num_top, first - 1))
        info = answer["meta_info"]
        rows = list(info.get("input_top_logprobs") or ())[1:] if num_draft_tokens else []
        if len(rows) != num_draft_tokens:
            raise Internal(f"SGLang returned {len(rows)} rows of logprobs for {num_draft_tokens} draft tokens")
        tops: list[TopTokens | None] = [_top_tokens(row, num_top) for row in rows]
        return [*tops, _top_of_output(info, num_top)], int(info.get("cached_tokens") or 0)

    async def _ask_row(self, rows_request: RowsRequest, row: int, num_top: int) -> TopTokens:
        prefix = rows_request.prefixes[row]
        answer = await self._generate(rows_request, prefix, _GREEDY, _logprobs(num_top, len(prefix) - 1))
        return _top_of_output(answer["meta_info"], num_top)

    async def _sample(self, rows_request: RowsRequest, row: int) -> tuple[Distribution, int]:
        options = _sampling_options(rows_request.filters, masks_end=rows_request.masks_end(row))
        options["sampling_seed"] = seed_at(rows_request, row)
        answer = await self._generate(rows_request, rows_request.prefixes[row], options)
        distribution = sampled(int(answer["output_ids"][0]))
        if rows_request.num_logprobs is not None:
            distribution = dataclasses.replace(
                distribution, top=await self._ask_raw(rows_request, row, int(distribution.token_ids[0]))
            )
        return distribution, int(answer["meta_info"].get("cached_tokens") or 0)

    async def _ask_raw(self, rows_request: RowsRequest, row: int, token_id: int) -> TopTokens:
        """Return the top tokens of a row for logprobs, and a token that SGLang sampled there."""
        prefix, num_top = rows_request.prefixes[row], rows_request.num_logprobs or 1
        fields = _logprobs(num_top, len(prefix) - 1) | {"token_ids_logprob": [token_id]}
        answer = await self._generate(rows_request, prefix, _GREEDY, fields)
        return _top_of_output(answer["meta_info"], num_top + 1)

    async def _generate(
        self,
        rows_request: RowsRequest,
        token_ids: TokenIds,
        options: Mapping[str, Any],
        fields: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        body = {**generate_body(token_ids.tolist(), options), **fields}
        tenant = rows_request.position.tenant
        if tenant != DEFAULT_TENANT:  # a tenant must not find another one's text in the prefix cache
            body["extra_key"] = f"specdec tenant {tenant}"
        try:
            return _checked(await self._connection.ask_pinned(_GENERATE, body))
        except Refused as refusal:
            raise Internal(f"the engine refused a round with status {refusal.status}") from refusal


async def open_sglang(
    connection: Connection, *, model: str, served_name: str, max_context_tokens: int | None
) -> SglangBackend:
    """Check an SGLang server and return its backend. The arguments and errors are those of `open_completions`."""
    files = read_model_files(model)
    listed = await listed_model(connection, served_name)
    info = await _server_info(connection)

    async def continue_greedily(prompt: Sequence[int]) -> Sequence[int]:
        options = {"max_new_tokens": NUM_PROBED_TOKENS, "temperature": 0.0, "ignore_eos": True}
        answer = _checked(await connection.ask(_GENERATE, generate_body(prompt, options)))
        return [int(token_id) for token_id in answer["output_ids"]]

    try:
        require_token_ids(await continue_greedily([0]), files, connection.url)
        fingerprint = await connection.pin(lambda: fingerprint_of(files, str(listed["id"]), continue_greedily))
    except (Refused, Internal) as error:
        raise unsuited(connection, f"does not generate from token ids: {error}") from error
    shape = BackendShape(
        backend="sglang",
        engine=f"SGLang {info.get('version', '')} {connection.url}",
        vocabulary_size=files.vocabulary_size,
        vocabulary_fingerprint=files.vocabulary_fingerprint,
        model_fingerprint=fingerprint,
        max_context_tokens=min(context_tokens(files, listed, max_context_tokens), int(info["max_req_input_len"])),
        eos_token_ids=files.eos_token_ids,
        unsupported_fields=(*PENALTIES, *_unsupported_seeds(connection, info)),
    )
    return SglangBackend(connection, shape, min(_MAX_LOGPROBS, files.vocabulary_size))


def _unsupported_seeds(connection: Connection, info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the field of seeds if the server ignores those of tokens that it samples."""
    if info.get("enable_deterministic_inference"):
        return ()
    _log.warning(
        "%s ignores seeds: sampled requests with a seed are refused; start SGLang with "
        "--enable-deterministic-inference to serve them",
        connection.url,
    )
    return ("sampling.seed",)


async def _server_info(connection: Connection) -> Mapping[str, Any]:
    """Return the server's description: its settings, and `max_req_input_len`, which a prompt must stay below.

    Raises:
        InvalidSetting: the server is not suited.
    """
    try:
        info: Mapping[str, Any] = await connection.ask("/server_info")
    except (Refused, Internal) as error:
        raise unsuited(connection, "has no /server_info: is it SGLang 0.5.23 or newer?") from error
    if not isinstance(info, dict) or not isinstance(info.get("max_req_input_len"), int):
        raise unsuited(connection, "states no max_req_input_len in /server_info: is it SGLang 0.5.23 or newer?")
    if info.get("speculative_algorithm"):
        raise unsuited(connection, "speculates itself: start SGLang without --speculative-algorithm")
    if info.get("disable_radix_cache"):
        raise unsuited(connection, "keeps no KV between rounds: start SGLang without --disable-radix-cache")
    if info.get("skip_tokenizer_init"):
        raise unsuited(connection, "cannot mask end tokens: start SGLang without --skip-tokenizer-init")
    return info


def generate_body(token_ids: Sequence[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a request that generates one token, unless `options` say otherwise."""
    return {"input_ids": list(token_ids), "sampling_params": {"max_new_tokens": 1, "ignore_eos": True, **options}}


def _logprobs(num_top: int, start: int) -> dict[str, Any]:
    """Return the fields that ask for the `num_top` top tokens of each position from prompt token `start` on."""
    return {"return_logprob": True, "top_logprobs_num": num_top, "logprob_start_len": start}


def _sampling_options(filters: SamplingFilters, *, masks_end: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": filters.temperature}
    if not filters.is_greedy:
        options |= {"top_p": filters.top_p, "top_k": filters.top_k or -1, "min_p": filters.min_p}
    if masks_end:
        ends = list(filters.end_token_ids)
        options |= {"min_new_tokens": 1, "stop_token_ids": ends, "ignore_eos": False}
    return options


def _checked(answer: Any) -> Any:
    """Return an answer that has tokens and their description. Raises Internal for another one."""
    if not isinstance(answer, dict) or not answer.get("output_ids") or not isinstance(answer.get("meta_info"), dict):
        raise Internal("SGLang returned no token")
    return answer


def _top_of_output(info: Mapping[str, Any], num_top: int) -> TopTokens:
    """Return the top tokens of the generated position, its own token and those asked for by id included."""
    try:
        (by_id,) = info.get("output_token_ids_logprobs") or [()]
        row = [*info["output_top_logprobs"][0], info["output_token_logprobs"][0], *by_id]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Internal("SGLang returned no logprobs of its token") from error
    return _top_tokens(row, num_top)


def _top_tokens(row: Any, num_top: int) -> TopTokens:
    """Return top tokens from entries of [logprob, token id, text]."""
    try:
        entries = {int(token_id): float(logprob) for logprob, token_id, *_ in row}
    except (TypeError, ValueError) as error:
        raise Internal("SGLang returned a row that is not a list of logprobs") from error
    if not all(0 <= token_id < 1 << 32 for token_id in entries):
        raise Internal("SGLang returned logprobs of token ids that are none")
    ordered = sorted(entries.items(), key=lambda entry: (-entry[1], entry[0]))[:num_top]
    logits = np.array([logprob for _, logprob in ordered])
    if not len(ordered) or np.isnan(logits).any() or not np.isfinite(logits[0]) or np.exp(logits).sum() > 1.001:
        raise Internal("SGLang returned logprobs that do not form a distribution")
    return TopTokens(np.array([token_id for token_id, _ in ordered], dtype=np.uint32), logits, 0.0)
