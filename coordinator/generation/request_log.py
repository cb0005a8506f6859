"""Stores a request in the session store, and reads it back so that any coordinator can replay or continue it.

A record holds the request's parameters with its seed, its turn, and the position at which its output starts; the token
log holds the tokens. Draws are keyed by seed, turn and position, so a resumed request continues with the same
distribution. `turn_preparer` writes and reads records, `publisher` and `log_repair` encode statistics.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter

from coordinator.requests import (
    GenerationIdentity,
    GenerationRequest,
    RequestParameters,
    RequestStats,
    SpeculationChoice,
)
from coordinator.round.session_tokens import SessionTokens
from coordinator.text.output import OutputStep, OutputWriter
from coordinator.text.output_parts import parts_of
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.constraint import Constraint, ConstraintKind
from specdec.contract.errors import InvalidRequest, NotFound, SessionLost
from specdec.contract.output_form import read_form
from specdec.contract.types import FinishReason, Mode, SamplingFilters, SamplingParams
from specdec.core.limits import check_filters
from specdec.state.store import KvLocation, RequestRecord, SessionRecord, SessionStore

#: Errors of JSON, or of values in it, that another program wrote.
_MALFORMED = (AttributeError, InvalidRequest, KeyError, OverflowError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A session's last request as the store knows it."""

    identity: GenerationIdentity
    token_ids: list[int]
    """All tokens of the session."""
    output: OutputStep
    writer: OutputWriter
    """Writer that has written `output` and continues its text."""
    round_id: int
    stats: RequestStats
    finish_reason: FinishReason | None
    kv_locations: tuple[KvLocation, ...] = ()
    """Replicas that held the session's KV after its previous turn."""


async def read_logged_request(
    store: SessionStore, session_id: str, tokenizer: ServedTokenizer, eos_of: Callable[[str], Sequence[int]]
) -> LoggedRequest:
    """Rebuild the state of a session's last request from its record and the token log.

    Args:
        store: session store of the tenant.
        session_id: id of the session.
        tokenizer: tokenizer of the target models.
        eos_of: returns the end tokens of a target model by its fingerprint.

    Raises:
        NotFound: the session does not exist, or holds no request.
        SessionLost: the log ends before the output began.
    """
    record, token_ids = await _read_turn(store, session_id)
    assert record.request is not None
    stored = record.request
    if len(token_ids) < stored.output_start:
        raise SessionLost(f"session {session_id} has lost part of its prompt")
    check_known(session_id, token_ids, tokenizer.vocabulary_size)
    identity = identity_of(session_id, stored)
    eos_token_ids = eos_of(identity.parameters.target_fingerprint)
    prompt, output = token_ids[: stored.output_start], token_ids[stored.output_start :]
    before = () if identity.parameters.is_chat else prompt
    parts = parts_of(identity, tokenizer)
    writer = OutputWriter(tokenizer, identity.parameters.sampling, eos_token_ids, before, parts)
    return LoggedRequest(
        identity=identity,
        token_ids=token_ids,
        output=writer.write(output),
        writer=writer,
        round_id=record.round_id,
        stats=decode_stats(stored.stats_json),
        finish_reason=stored.finish_reason,
        kv_locations=record.locations,
    )


async def _read_turn(store: SessionStore, session_id: str) -> tuple[SessionRecord, list[int]]:
    """Return a record with a request, and the tokens of the same turn. Raises NotFound if a request is missing.

    Raises SessionLost as `check_sealed`.

    Record and tokens are two reads. They are repeated if the session has changed its owner or its request between them,
    since the tokens may then belong to another turn, or to a new session of the same id; and if the tokens are fewer
    than the record has, since the store may have lost writes. A coordinator that takes a session raises its epoch
    before it writes the next request.
    """
    record, token_ids = await store.load(session_id), []
    while record is not None and record.request is not None:
        token_ids = (await store.read_tokens(session_id)).tolist()
        before, record = record, await store.load(session_id)
        is_same = record is not None and _writer_of(record) == _writer_of(before)
        if is_same and len(token_ids) >= before.num_tokens:
            del token_ids[before.num_tokens :]
            check_sealed(before, token_ids)
            return before, token_ids
    raise NotFound(f"session {session_id} has no request to resume", field="session_id")


def check_sealed(record: SessionRecord, token_ids: Sequence[int]) -> None:
    """Raise SessionLost unless `token_ids`, as read from the log, are those that were committed."""
    if (seal := record.seal) is None:
        return
    if len(token_ids) < seal.num_tokens or (
        seal.chain_hash and SessionTokens(token_ids).prefix_hash(len(token_ids)) != seal.chain_hash
    ):
        raise SessionLost(
            f"the store has changed the log of session {record.session_id}: its {len(token_ids)} tokens are not the "
            f"{seal.num_tokens} that were committed"
        )


def _writer_of(record: SessionRecord) -> tuple[int, str | None]:
    """Return the epoch and the request id under which a session was last written."""
    return record.epoch, None if record.request is None else record.request.request_id


def check_known(session_id: str, token_ids: Sequence[int], vocabulary_size: int) -> None:
    """Raise SessionLost if the log holds a token id that the tokenizer does not know."""
    if max(token_ids, default=0) >= vocabulary_size:
        raise SessionLost(
            f"the log of session {session_id!r} in the store is damaged; delete the session, or use another: it holds "
            f"token id {max(token_ids)}, and the vocabulary has {vocabulary_size}",
            field="session_id",
        )


def no_session(session_id: str) -> NotFound:
    """Return the error for a session that does not exist."""
    return NotFound(f"session_id {session_id!r} is not a session", field="session_id")


def nothing_to_resume(session_id: str, num_held: int) -> NotFound | SessionLost:
    """Return the error for a resumption without a request. A caller that holds tokens has seen the session."""
    if num_held == 0:
        return no_session(session_id)
    return SessionLost(
        f"session {session_id} is gone, and with it the output of which {num_held} tokens are held", field="resume_from"
    )


def check_same_request(request: GenerationRequest, request_id: str, digest: str) -> None:
    """Refuse a resumption that names another request id, and a retry whose fields differ from the first call's."""
    if request.request_id and request.request_id != request_id:
        raise InvalidRequest(
            f"request_id must be that of the session's last request, {request_id!r}, got {request.request_id!r}",
            field="request_id",
        )
    if request.resume_from is None and not request.is_same_as(digest):
        raise InvalidRequest(f"request_id {request_id!r} was used for another request", field="request_id")


def check_held(num_held: int, num_output: int, *, has_finished: bool) -> None:
    """Refuse a caller that holds more output tokens than the output has.

    Raises:
        InvalidRequest: the request has finished with fewer tokens. Its end is committed together with its last tokens,
            so none can be missing.
        SessionLost: the request has not finished. The log held the caller's tokens, and has lost them.
    """
    if num_held > num_output:
        error_type = InvalidRequest if has_finished else SessionLost
        raise error_type(
            f"resume_from must be at most the {num_output} tokens of the output, got {num_held}", field="resume_from"
        )


def check_expected(expected: int | None, session_id: str, num_held: int | None) -> None:
    """Raise SessionLost unless the session holds `expected` tokens; `num_held` is None if it does not exist."""
    if expected is not None and expected != (num_held or 0):
        found = "it is gone, so that it holds 0" if num_held is None else f"it holds {num_held}"
        raise SessionLost(
            f"session {session_id} was expected to hold {expected} tokens, {found}", field="expected_session_tokens"
        )


def check_left(request: GenerationRequest, record: SessionRecord | None) -> None:
    """Raise SessionLost if a turn would be appended to an unfinished one whose last tokens may be missing.

    Either the owner of the unfinished turn died, or the store lost its end; this coordinator cannot tell which. A
    request that sends the whole conversation, or names the number of tokens it expects, does not depend on them.
    """
    if record is None or record.request is None or record.request.finish_reason is not None or record.was_left:
        return
    if request.messages is None and request.expected_session_tokens is None:
        raise SessionLost(
            f"the last request of session {record.session_id}, {record.request.request_id!r}, has not ended, and the "
            f"{record.num_tokens} tokens of the session may lack its last ones: resume it, or say "
            "expected_session_tokens",
            field="expected_session_tokens",
        )


def identity_of(session_id: str, stored: RequestRecord) -> GenerationIdentity:
    parameters = decode_parameters(stored.parameters_json)
    return GenerationIdentity(
        session_id, stored.request_id, stored.request_digest, stored.turn, stored.output_start, parameters, stored.payer
    )


def record_of(identity: GenerationIdentity) -> RequestRecord:
    """Return the record that is stored when a request begins; `identity_of` reads it back."""
    parameters_json = encode_parameters(identity.parameters)
    return RequestRecord(
        identity.request_id,
        identity.digest,
        parameters_json,
        identity.turn,
        identity.output_start,
        payer=identity.payer,
    )


def encode_parameters(parameters: RequestParameters) -> str:
    """Return JSON that `decode_parameters` reads back exactly (floats round-trip)."""
    sampling = parameters.sampling
    # Keys of JSON objects are strings, so the bias is stored as pairs. "law" is the stored name of the filters.
    filters = asdict(replace(sampling.filters, logit_bias={})) | {"logit_bias": [*sampling.filters.logit_bias.items()]}
    flat = asdict(replace(sampling, filters=SamplingFilters(logit_bias={})))
    del filters["constraint_id"], flat["filters"]["constraint_id"]
    if sampling.constraint is None:  # older versions refuse the field, and with it the request
        del flat["constraint"]
    else:
        flat["constraint"]["id"] = sampling.filters.constraint_id.hex()
        flat["constraint"]["warnings"] = parameters.constraint_warnings
    if parameters.adapter:  # older versions refuse the field: they would go on with the base model
        flat["adapter"] = parameters.adapter
    if parameters.output_form is not None:  # older versions refuse the field
        flat["output_form"] = parameters.output_form.as_dict()
    speculation = asdict(parameters.speculation)
    if not parameters.speculation.task:  # older versions refuse the field
        del speculation["task"]
    return json.dumps(
        {
            "sampling": flat | {"law": filters},
            "speculation": speculation,
            "target_fingerprint": parameters.target_fingerprint,
            "target_changed": parameters.target_changed,
            "is_chat": parameters.is_chat,
        }
    )


def decode_parameters(text: str) -> RequestParameters:
    """Return the parameters that `encode_parameters` wrote. Raises SessionLost for a text that it did not write."""
    try:
        parameters = _read_parameters(text)
        _check_parameters(parameters)
    except _MALFORMED as error:
        raise _damaged("parameters_json", error) from error
    return parameters


def _damaged(field: str, error: Exception) -> SessionLost:
    return SessionLost(
        "the record of the session in the store is damaged; delete the session, or use another: "
        f"{field}: {type(error).__name__}: {str(error)[:200]}",
        field="session_id",
    )


def _check_parameters(parameters: RequestParameters) -> None:
    """Raise ValueError, TypeError or InvalidRequest for parameters that no request can have."""
    sampling, speculation = parameters.sampling, parameters.speculation
    filters = sampling.filters
    check_filters(filters, 1 << 32)
    counts = {
        "max_new_tokens": (sampling.max_new_tokens, 1, 1 << 31),
        "seed": (sampling.seed, 0, 1 << 64),
        "num_logprobs": (sampling.num_logprobs or 0, 0, 1 << 16),
        "top_k": (filters.top_k, 0, 1 << 31),
        "min_new_tokens": (filters.min_new_tokens, 0, 1 << 31),
        "gamma": (speculation.gamma or 0, 0, 1 << 16),
    }
    for name, (value, least, limit) in counts.items():
        if not isinstance(value, int) or not least <= value < limit:
            raise ValueError(f"{name} is {value!r}")
    choice = (speculation.draft_pool, speculation.task, parameters.adapter)
    texts = (*sampling.stop, *choice, parameters.target_fingerprint, *parameters.constraint_warnings)
    ids = (*sampling.stop_token_ids, *filters.end_token_ids)
    if not (all(isinstance(text, str) for text in texts) and all(isinstance(token_id, int) for token_id in ids)):
        raise TypeError("a field has another type")


def _read_parameters(text: str) -> RequestParameters:
    fields = json.loads(text)
    filters, sampling, speculation = fields["sampling"].pop("law"), fields["sampling"], fields["speculation"]
    filters |= {
        "logit_bias": {int(token_id): bias for token_id, bias in filters["logit_bias"]},
        "end_token_ids": tuple(filters["end_token_ids"]),
    }
    warnings: tuple[str, ...] = ()
    if "constraint" in sampling:
        stored = sampling["constraint"]
        filters["constraint_id"] = bytes.fromhex(stored.pop("id"))
        warnings = tuple(stored.pop("warnings"))
        sampling["constraint"] = Constraint(**stored | {"kind": ConstraintKind(stored["kind"])})
    output_form, adapter = sampling.pop("output_form", None), sampling.pop("adapter", "")
    sampling |= {
        "filters": SamplingFilters(**filters),
        "stop": tuple(sampling["stop"]),
        "stop_token_ids": tuple(sampling["stop_token_ids"]),
    }
    return RequestParameters(
        SamplingParams(**sampling),
        SpeculationChoice(**speculation | {"mode": Mode(speculation["mode"])}),
        fields["target_fingerprint"],
        # Absent in requests that older versions stored; those that state no `is_chat` began a text with every output.
        fields.get("target_changed", False),
        fields.get("is_chat", True),
        warnings,
        None if output_form is None else read_form(output_form),
        adapter,
    )


_STATS_FIELDS = tuple(RequestStats.__dataclass_fields__)
_STATS_FORMAT = "{" + ",".join(f'"{name}":%r' for name in _STATS_FIELDS) + "}"
_stats_values = attrgetter(*_STATS_FIELDS)


def encode_stats(stats: RequestStats) -> str:
    """Return JSON that `decode_stats` reads back exactly."""
    # Runs once a round, so it avoids json.dumps: Python prints counts, times and lists of counts as JSON does.
    return _STATS_FORMAT % _stats_values(stats)


def decode_stats(text: str) -> RequestStats:
    """Return the statistics that `encode_stats` wrote; a missing counter is 0.

    Raises SessionLost for a text that it did not write.
    """
    try:
        stats = RequestStats(**json.loads(text))
        for name, usual in asdict(RequestStats()).items():
            values = getattr(stats, name)
            for value in values if isinstance(usual, list) else (values,):
                limit = 1 << (64 if name == "wire_bytes" else 32)
                if not isinstance(value, float if isinstance(usual, float) else int) or not 0 <= value < limit:
                    raise ValueError(f"{name} is {value!r}")
    except _MALFORMED as error:
        raise _damaged("stats_json", error) from error
    return stats
