"""API keys: the file's form, its reloading, rights, and the limits of a key."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from gateway.auth import ApiKeys
from specdec.access.callers import Callers
from specdec.access.grants import Access, Limits
from specdec.access.keys import parse_keys
from specdec.contract.errors import Forbidden, InvalidRequest, ResourceExhausted, Unauthenticated
from specdec.state.connection import RedisConnection
from specdec.state.shared_quotas import SharedQuotas
from tests.support.clock import Clock
from tests.support.key_files import key_line as line
from tests.support.key_files import write_private
from tests.support.redis_fixture import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]


def write(path: Path, *lines: str) -> None:
    write_private(path, "".join(lines))


def test_a_key_has_the_tenant_rights_and_limits_of_its_line() -> None:
    keys = parse_keys(
        "# who\n\n"
        + line("a", "acme generate")
        + line(
            "b", "b.org generate,operate concurrent=2,rpm=60,tpm=9000,sessions=5,prompt_tokens=700,reserved_tokens=9"
        )
    )
    first, second = keys.values()
    assert (first.tenant, first.rights, first.limits) == ("acme", frozenset({"generate"}), Limits())
    assert (second.tenant, second.limits) == ("b.org", Limits(2, 60, 9000, 5, 700, 9))
    assert second.rights == {"generate", "operate"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("abc acme generate\n", "line 1: the key's SHA-256 must be 64 hexadecimal digits"),
        (line("a", "acme"), "line 1: must be SHA256 TENANT RIGHTS"),
        (line("a", "acme generate,fly"), "rights must be among generate, operate, service, got 'generate,fly'"),
        (line("a", "ac/me generate"), "tenant: 'ac/me' is not 1 to 64"),
        (line("a", "x" * (1 << 20) + " generate"), "x' is not 1 to 64 letters"),
        (line("a", "acme generate rpm=0"), "sessions=N, prompt_tokens=N or reserved_tokens=N with N of 1 or more"),
        (line("a", "acme generate tpm=-1"), "with N of 1 or more, got 'tpm=-1'"),
        (line("a", "acme generate sessions=99999999999"), "got 'sessions=99999999999'"),
        (line("a", "x generate") + line("a", "y generate"), "line 2: this key has a line before"),
    ],
)
def test_a_malformed_line_is_refused_by_its_number_without_its_hash(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_keys(text)
    assert words in refused.value.message
    assert text.split()[0] not in refused.value.message
    assert len(refused.value.message) < 400


def test_a_changed_file_is_read_again_and_one_with_a_mistake_leaves_the_old_keys(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    write(path, line("old", "acme generate"))
    keys = ApiKeys(path, allow_anonymous=False, clock=clock)
    assert keys.access("old").tenant == "acme"

    write(path, line("new", "acme generate"))
    clock.now_s += 2
    assert keys.access("new").tenant == "acme"
    with pytest.raises(Unauthenticated):
        keys.access("old")

    write(path, "nonsense\n")
    clock.now_s += 2
    assert keys.access("new").tenant == "acme"

    path.unlink()
    clock.now_s += 2
    assert keys.access("new").tenant == "acme"


def test_a_file_that_cannot_be_read_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        ApiKeys(tmp_path / "absent")


def test_a_file_that_other_users_may_read_is_refused_but_the_group_may_read_one_of_root(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, line("a", "acme generate"))
    path.chmod(0o622)
    with pytest.raises(InvalidRequest, match=r"api_keys: other users may .* \(mode 622\): run chmod 600"):
        ApiKeys(path)
    path.chmod(0o640)
    if os.geteuid() == 0:  # secrets of containers are like this
        ApiKeys(path)
        path.chmod(0o644)
        with pytest.raises(InvalidRequest, match="other users may read or write"):
            ApiKeys(path)
        path.chmod(0o640)
        os.chown(path, 12345, -1)
    with pytest.raises(InvalidRequest, match="other users may read or write"):
        ApiKeys(path)


def test_a_tenant_with_several_keys_has_the_loosest_of_their_limits_and_changes_with_the_file(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    one, other = line("a", "acme generate rpm=5,tpm=70,sessions=2"), line("b", "acme generate rpm=9,tpm=60")
    write(path, one, other, line("c", "beta generate"))
    callers = Callers(path, clock=clock)
    assert callers.limits_of("acme") == Limits(None, 9, 70, None, None)
    assert callers.limits_of("beta") == callers.limits_of("unknown") == Limits()
    write(path, one)
    clock.now_s += 2
    assert callers.limits_of("acme") == Limits(None, 5, 70, 2, None)


def test_a_missing_key_an_unknown_key_and_a_key_without_the_right_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, line("operator", "ops operate"))
    keys = ApiKeys(path, key="single", allow_anonymous=False)
    with pytest.raises(Unauthenticated, match="an API key is needed"):
        keys.access(None)
    with pytest.raises(Unauthenticated, match="the API key is unknown"):
        keys.access("other")
    with pytest.raises(Forbidden, match="lack the right generate; they have operate"):
        keys.access("operator")
    assert keys.access("single").tenant == ""


def test_a_gateway_without_keys_answers_clients_that_send_one() -> None:
    assert ApiKeys().access("sk-anything").tenant == ""


async def test_a_key_may_have_only_its_number_of_requests_at_once() -> None:
    keys = ApiKeys()
    (access,) = parse_keys(line("a", "acme generate concurrent=1")).values()
    async with keys.admitted(access):
        with pytest.raises(ResourceExhausted, match="may have 1 requests at once"):
            await admit(keys, access)
    await admit(keys, access)


async def test_requests_a_minute_refill_with_time() -> None:
    clock = Clock()
    keys = ApiKeys(clock=clock)
    (access,) = parse_keys(line("a", "acme generate rpm=2")).values()
    for _ in range(2):
        await admit(keys, access)
    with pytest.raises(ResourceExhausted) as refused:
        await admit(keys, access)
    assert refused.value.reason == "QUOTA_EXCEEDED"
    assert refused.value.retry_after_s == pytest.approx(30)
    clock.now_s += 30
    await admit(keys, access)


async def test_gateways_count_a_key_together_and_alone_while_the_store_is_away(redis_url: str) -> None:
    (access,) = parse_keys(line(uuid.uuid4().hex, "acme generate concurrent=2,rpm=4")).values()
    connection = RedisConnection(redis_url)
    one, other = ApiKeys(), ApiKeys()
    shares = [SharedQuotas(connection, name, lease_ttl_s=30.0) for name in ("one", "other")]
    for keys, shared in zip((one, other), shares, strict=True):
        keys.count_with(shared)
    async with one.admitted(access), one.admitted(access):
        with pytest.raises(ResourceExhausted, match="may have 2 requests at once"):
            await admit(other, access)
    for keys in (one, other):
        await admit(keys, access)
    with pytest.raises(ResourceExhausted, match="may send 4 requests a minute"):
        await admit(one, access)
    for shared in shares:
        await shared.close()
    await connection.close()
    away = RedisConnection("redis://127.0.0.1:1")
    alone = ApiKeys()
    alone.count_with(SharedQuotas(away, "alone", lease_ttl_s=30.0))
    for _ in range(4):
        await admit(alone, access)
    with pytest.raises(ResourceExhausted, match="may send 4 requests a minute"):
        await admit(alone, access)
    await away.close()


async def admit(keys: ApiKeys, access: Access) -> None:
    """Run one request of a key."""
    async with keys.admitted(access):
        pass


@pytest.mark.parametrize("text", ["", "# none left\n", "\n"])
def test_a_file_that_becomes_empty_accepts_no_key(tmp_path: Path, text: str) -> None:
    path, clock = tmp_path / "keys", Clock()
    write(path, line("a", "acme generate"))
    keys = ApiKeys(path, allow_anonymous=False, clock=clock)
    assert keys.access("a").tenant == "acme"
    write(path, text)
    clock.now_s += 2
    for key in ("a", "guessed", None):
        with pytest.raises(Unauthenticated):
            keys.access(key)
