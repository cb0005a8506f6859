"""The schema version of stored sessions: a newer one is refused by name, an absent one is that of the first version."""

from __future__ import annotations

import pytest

from specdec.contract.errors import SessionLost, Unavailable
from specdec.state.connection import RedisConnection
from specdec.state.key_names import session_keys
from specdec.state.session_fields import SCHEMA
from specdec.state.store import Lease, SessionStore


async def test_a_session_states_the_schema_of_the_version_that_stored_it(
    store: SessionStore, raw: RedisConnection, lease: Lease
) -> None:
    meta = session_keys(*lease.key)[0]
    assert await raw.run_command("HGET", meta, "schema") == str(SCHEMA).encode()


async def test_a_session_of_a_newer_schema_is_refused_in_one_line_and_can_be_deleted(
    store: SessionStore, raw: RedisConnection, lease: Lease
) -> None:
    await raw.run_command("HSET", session_keys(*lease.key)[0], "schema", SCHEMA + 1, "field_of_then", b"\xff")
    with pytest.raises(
        Unavailable, match=f"stored by a newer specdec .schema {SCHEMA + 1}; .*up to {SCHEMA}."
    ) as caught:
        await store.load(lease.session_id)
    assert (caught.value.reason, caught.value.field) == ("SCHEMA_TOO_NEW", "session_id")
    assert "\n" not in caught.value.message
    await store.delete(lease.session_id)
    assert await store.load(lease.session_id) is None


async def test_a_session_without_a_schema_is_read_as_one_of_the_first_versions(
    store: SessionStore, raw: RedisConnection, lease: Lease
) -> None:
    await raw.run_command("HDEL", session_keys(*lease.key)[0], "schema")
    record = await store.load(lease.session_id)
    assert record is not None
    assert record.num_tokens == 3


async def test_a_schema_that_is_no_number_is_damage(store: SessionStore, raw: RedisConnection, lease: Lease) -> None:
    await raw.run_command("HSET", session_keys(*lease.key)[0], "schema", "two")
    with pytest.raises(SessionLost, match="schema is 'two'"):
        await store.load(lease.session_id)
