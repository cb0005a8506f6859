"""Responses that the gateway has stored, on Redis: one record for each, which every gateway of a system can read.

    specdec:TENANT:response:ID   string: JSON

A record has the answer as it was given, the conversation up to it, and where that conversation ended in its session.
It expires with the session. The gateway's route /v1/responses writes and reads records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec.contract.errors import Internal, InvalidRequest
from specdec.settings.cluster_names import DEFAULT_CLUSTER
from specdec.state.connection import RedisConnection
from specdec.state.key_names import response_key

#: Longest record; the conversation of a long context fits.
MAX_RECORD_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A stored response."""

    answer: Mapping[str, Any]
    """The response as the client got it."""
    messages: Sequence[Mapping[str, Any]]
    """The whole conversation, the output included, without instructions."""
    session_id: str
    num_tokens: int
    """Number of tokens in the session after the output."""


class RedisResponses:
    """Stored responses of all tenants. Safe for any number of tasks of one event loop.

    All methods raise Unavailable (STORE_UNAVAILABLE) if the store cannot be reached, InvalidRequest for a tenant with
    a malformed name, and Unsupported if the URL is memory:// and its package is not installed.
    """

    def __init__(self, url: str, *, cluster: str = DEFAULT_CLUSTER) -> None:
        """Open no connection yet. `url` has a form of `specdec.settings.redis_url`."""
        self._url = url
        self._cluster = cluster
        self._opened: RedisConnection | None = None

    async def put(self, tenant: str, response_id: str, record: ResponseRecord, *, ttl_s: float) -> None:
        """Store a record for `ttl_s`, over the one before. Raises InvalidRequest if it is too large."""
        value = encode_record(record)
        await self._connection.run_command("SET", self._key(tenant, response_id), value, "PX", _milliseconds(ttl_s))

    async def read(self, tenant: str, response_id: str) -> ResponseRecord | None:
        """Return a record, or None. Raises Internal for a record that is malformed."""
        value = await self._connection.run_command("GET", self._key(tenant, response_id))
        return None if value is None else _decode_record(value)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a record. Idempotent."""
        await self._connection.run_command("DEL", self._key(tenant, response_id))

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    def _key(self, tenant: str, response_id: str) -> str:
        return response_key(tenant, response_id, self._cluster)

    @property
    def _connection(self) -> RedisConnection:
        if self._opened is None:
            self._opened = RedisConnection(self._url)
        return self._opened


def encode_record(record: ResponseRecord) -> bytes:
    """Return the bytes of a record. Raises InvalidRequest if they are too many."""
    value = json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
    if len(value) > MAX_RECORD_BYTES:
        raise InvalidRequest(
            f"input: the conversation takes {len(value)} bytes, and at most {MAX_RECORD_BYTES} are stored; "
            "send a shorter one, or store: false",
            field="input",
        )
    return value


def _decode_record(value: bytes) -> ResponseRecord:
    """Return the record in a value. Raises Internal for a malformed one, which another program may have written."""
    try:
        record = ResponseRecord(**json.loads(value))
        is_valid = isinstance(record.answer, dict) and isinstance(record.messages, list)
        if not (is_valid and isinstance(record.session_id, str) and isinstance(record.num_tokens, int)):
            raise TypeError("a field has another type")
        if not 0 <= record.num_tokens < 1 << 32:
            raise ValueError("the session's number of tokens is out of range")
    except (ValueError, TypeError, RecursionError) as error:
        raise Internal("the record of the response in the store cannot be read; send the whole conversation") from error
    return record


def _milliseconds(seconds: float) -> int:
    # Redis refuses an expiry of 0.
    return max(1, round(seconds * 1000))
