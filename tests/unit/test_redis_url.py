"""URLs of a Redis: what they name, and what is refused in one line that repeats no secret."""

from __future__ import annotations

import pytest

from specdec.contract.errors import InvalidRequest
from specdec.settings.cluster_names import check_cluster
from specdec.settings.redis_url import CLUSTER, SENTINEL, parse_redis_url
from specdec.settings.target import TargetSettings


def test_a_sentinel_url_names_sentinels_a_service_and_a_database() -> None:
    url = parse_redis_url("redis+sentinel://me:p%40ss@a:1,b,[::1]:3/svc/2?socket_timeout=1.5&sentinel_password=other")
    assert (url.kind, url.path, url.database, url.is_tls) == (SENTINEL, "svc", "2", False)
    assert url.addresses == (("a", 1), ("b", 26379), ("::1", 3))
    assert url.place == "redis+sentinel://a:1,b,[::1]:3/svc/2"
    assert url.of_server("::1", 5) == "redis://me:p%40ss@[::1]:5/2?socket_timeout=1.5"
    assert url.of_sentinel("a", 1) == "redis://a:1?password=other"


def test_a_cluster_url_with_tls_gives_every_node_its_files() -> None:
    url = parse_redis_url("rediss+cluster://me:pass@a:1,b:2?ssl_ca_certs=%2Fca.pem&client_name=x")
    assert (url.kind, url.is_tls, url.addresses) == (CLUSTER, True, (("a", 1), ("b", 2)))
    assert url.of_server("c", 3) == "rediss://me:pass@c:3?ssl_ca_certs=%2Fca.pem&client_name=x"


@pytest.mark.parametrize("url", ["redis://", "redis://h", "redis://h:1/3?db=4", "rediss://h?ssl_cert_reqs=none"])
@pytest.mark.parametrize("user", ["", "me:secret@"])
def test_a_url_of_one_server_is_read_as_before(url: str, user: str) -> None:
    place = parse_redis_url(url.replace("://", f"://{user}")).place
    assert place == url.partition("?")[0]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://u:secret@h", "must begin with redis://"),
        ("127.0.0.1:6379", "must begin with redis://"),
        ("redis://[::1", "is not a URL"),
        ("redis://u:secret@h:port", "'h:port'"),
        ("redis://h:99999", "'h:99999'"),
        ("redis://h/first", "'first'"),
        ("redis+sentinel://u:secret@h:1", "names no service"),
        ("redis+cluster://u:secret@h:1/0", "no databases"),
        ("redis+cluster://h?db=1", "unknown parameter 'db'"),
        ("redis://u:secret@h?pasword=secret", "unknown parameter 'pasword'; known are username"),
        *(
            (f"redis://{user}@h:6379/0", "has an @ behind the address")
            for user in (":sec/secret", "u:1234/secret", ":pa?secret", ":pa#secret")
        ),
        ("redis://h#0", "has a part behind #"),
        ("memory://?db=1", "unknown parameter 'db'; there are none"),
        ("redis://h?ssl_certfile=x", "needs rediss://"),
        ("rediss://h?ssl_cert_reqs=secret", "not required, optional or none"),
        ("redis://h?socket_timeout=0", "not a number of seconds above 0"),
        ("redis://h?db=1&db=2", "twice"),
        ("unix://", "unix:///PATH"),
    ],
)
def test_a_bad_url_is_refused_in_one_line_without_its_secrets(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        parse_redis_url(url)
    message = str(raised.value)
    assert words in message
    assert "secret" not in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["", "a:b", "a b", "x" * 65, "{a}"])
def test_a_bad_name_of_a_cluster_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"cluster: .* is not 1 to 64 letters"):
        check_cluster(name)
    with pytest.raises(ValueError, match="is not 1 to 64 letters"):
        TargetSettings(model="m", listen="127.0.0.1:0", cluster=name)


def test_the_kv_tier_may_be_no_node_of_the_sessions_redis() -> None:
    with pytest.raises(ValueError, match="is the Redis of --redis-url"):
        TargetSettings(model="m", listen="127.0.0.1:0", redis_url="redis+cluster://a:1,b:2", kv_tier_url="redis://b:2")
