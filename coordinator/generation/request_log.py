"""What a request leaves in the session store, and how any coordinator reads it back to replay it or carry on.

A record holds the request's parameters with its seed, its turn and where its output starts; the token log holds the
rest. Randomness is keyed by seed, turn and position, so the distribution goes on where it stopped. What was written or
read goes back to `turn_preparer`, and with it to `factory`. Not here: leases, replicas (they answer KV_MISS and are
sent what they lack). Called by `turn_preparer`, `publisher` and `tails`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter

from coordinator.requests import (
    GenerationIdentity,
    GenerationRequest,
    RequestParameters,
    RequestStats,
    SpeculationChoice,
)
from coordinator.text.output import OutputStep, OutputWriter
from coordinator.text.tokenizer import ServedTokenizer
from specdec.errors import InvalidRequest, NotFound, SessionLost
from specdec.state.store import KvLocation, RequestRecord, SessionRecord, SessionStore
from specdec.types import FinishReason, Mode, SamplingFilters, SamplingParams


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A session's last request as the store knows it."""

    identity: GenerationIdentity
    token_ids: list[int]
    """All tokens of the session."""
    output: OutputStep
    writer: OutputWriter
    """Has written `output`; what follows continues its text."""
    round_id: int
    stats: RequestStats
    finish_reason: FinishReason | None
    homes: tuple[KvLocation, ...] = ()
    """Where the session's KV was left."""


async def read_logged_request(
    store: SessionStore, session_id: str, tokenizer: ServedTokenizer, eos_token_ids: Sequence[int]
) -> LoggedRequest:
    """Rebuilds the state of a session's last request from its record and token log.

    Raises:
        NotFound: no such session, or no request in it.
        SessionLost: the log ends before the output began.
    """
    record, token_ids = await _read_turn(store, session_id)
    assert record.request is not None
    stored = record.request
    if len(token_ids) < stored.output_start:
        raise SessionLost(f"session {session_id} has lost part of its prompt")
    identity = identity_of(session_id, stored)
    writer = OutputWriter(tokenizer, identity.parameters.sampling, eos_token_ids)
    output = token_ids[stored.output_start :]
    return LoggedRequest(
        identity=identity,
        token_ids=token_ids,
        output=writer.write(output),
        writer=writer,
        round_id=record.round_id,
        stats=decode_stats(stored.stats_json),
        finish_reason=stored.finish_reason,
        homes=record.locations,
    )


async def _read_turn(store: SessionStore, session_id: str) -> tuple[SessionRecord, list[int]]:
    """A record with a request, and no fewer tokens than were there by then. Raises NotFound where there is none.

    They are read one after the other, and once more where the session has changed hands or got another request between
    them: the tokens may be another turn's, or those of another session of that id. Who takes a session raises its epoch
    before the next request's beginning is written.
    """
    record, token_ids = await store.load(session_id), []
    while record is not None and record.request is not None:
        token_ids = (await store.read_tokens(session_id)).tolist()
        before, record = record, await store.load(session_id)
        if record is not None and _writer_of(record) == _writer_of(before):
            return before, token_ids
    raise NotFound(f"session {session_id} has no request to resume", field="session_id")


def _writer_of(record: SessionRecord) -> tuple[int, str | None]:
    """By whom, and for which request, a session was written last."""
    return record.epoch, None if record.request is None else record.request.request_id


def check_same_request(request: GenerationRequest, request_id: str, digest: str) -> None:
    """A resumption may leave the request's id out, but not name another; a retry must ask the same."""
    if request.request_id and request.request_id != request_id:
        raise InvalidRequest(
            f"request_id must be that of the session's last request, {request_id!r}, got {request.request_id!r}",
            field="request_id",
        )
    if request.resume_from is None and not request.is_same_as(digest):
        raise InvalidRequest(f"request_id {request_id!r} was used for another request", field="request_id")


def check_held(num_held: int, num_output: int, *, has_finished: bool) -> None:
    """Refuses a caller who holds more output tokens than there are.

    Raises:
        InvalidRequest: the request has ended, with fewer: its end is committed together with its last tokens.
        SessionLost: it has not; what the caller holds was in the log.
    """
    if num_held > num_output:
        error_type = InvalidRequest if has_finished else SessionLost
        raise error_type(
            f"resume_from must be at most the {num_output} tokens of the output, got {num_held}", field="resume_from"
        )


def check_expected(expected: int | None, session_id: str, num_held: int | None) -> None:
    """Raises SessionLost when a session, if there is one (else None), holds another number of tokens than expected."""
    if expected is not None and expected != (num_held or 0):
        found = "it is gone, so that it holds 0" if num_held is None else f"it holds {num_held}"
        raise SessionLost(
            f"session {session_id} was expected to hold {expected} tokens, {found}", field="expected_session_tokens"
        )


def check_left(request: GenerationRequest, record: SessionRecord | None) -> None:
    """Raises SessionLost where a turn would be appended to one that neither ended nor was left.

    Its owner died, or the store lost its end: nobody here knows which. A caller that sends the whole conversation, or
    says how many tokens the session holds, does not build on what may be lost.
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
    return GenerationIdentity(
        session_id=session_id,
        request_id=stored.request_id,
        digest=stored.request_digest,
        turn=stored.turn,
        output_start=stored.output_start,
        parameters=decode_parameters(stored.parameters_json),
    )


def record_of(identity: GenerationIdentity) -> RequestRecord:
    """What is stored of a request when it begins; `identity_of` reads it back."""
    return RequestRecord(
        request_id=identity.request_id,
        request_digest=identity.digest,
        parameters_json=encode_parameters(identity.parameters),
        turn=identity.turn,
        output_start=identity.output_start,
    )


def encode_parameters(parameters: RequestParameters) -> str:
    """JSON that `decode_parameters` reads back exactly (floats round-trip)."""
    sampling = parameters.sampling
    # Keys of JSON objects are strings, so the bias travels as pairs.
    law = asdict(replace(sampling.filters, logit_bias={})) | {"logit_bias": list(sampling.filters.logit_bias.items())}
    flat = asdict(replace(sampling, filters=SamplingFilters(logit_bias={})))
    speculation = asdict(parameters.speculation)
    if not parameters.speculation.task:  # which older versions do not read
        del speculation["task"]
    return json.dumps(
        {
            "sampling": flat | {"law": law},
            "speculation": speculation,
            "target_fingerprint": parameters.target_fingerprint,
            "target_changed": parameters.target_changed,
        }
    )


def decode_parameters(text: str) -> RequestParameters:
    """The inverse of `encode_parameters`."""
    fields = json.loads(text)
    law, sampling, speculation = fields["sampling"].pop("law"), fields["sampling"], fields["speculation"]
    law |= {
        "logit_bias": {int(token_id): bias for token_id, bias in law["logit_bias"]},
        "end_token_ids": tuple(law["end_token_ids"]),
    }
    sampling |= {
        "filters": SamplingFilters(**law),
        "stop": tuple(sampling["stop"]),
        "stop_token_ids": tuple(sampling["stop_token_ids"]),
    }
    speculation |= {"mode": Mode(speculation["mode"])}
    return RequestParameters(
        SamplingParams(**sampling),
        SpeculationChoice(**speculation),
        fields["target_fingerprint"],
        fields.get("target_changed", False),  # a request that an older version stored does not say
    )


_STATS_FIELDS = tuple(RequestStats.__dataclass_fields__)
_STATS_FORMAT = "{" + ",".join(f'"{name}":%r' for name in _STATS_FIELDS) + "}"
_stats_values = attrgetter(*_STATS_FIELDS)


def encode_stats(stats: RequestStats) -> str:
    """JSON that `decode_stats` reads back exactly."""
    # Once a round: counts, times and a list of counts are JSON as Python prints them.
    return _STATS_FORMAT % _stats_values(stats)


def decode_stats(text: str) -> RequestStats:
    """The inverse of `encode_stats`; missing counters are 0."""
    return RequestStats(**json.loads(text))
