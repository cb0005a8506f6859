"""Keys of an issuer at a URL: fetched at the start, at an interval, and for a token whose key is not known yet."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from specdec.access import json_web_tokens
from specdec.access.json_web_tokens import TokenVerifier
from specdec.errors import Unauthenticated, Unavailable


class Issuer:
    """An issuer with one key at a time."""

    def __init__(self) -> None:
        self.num_fetches = 0
        self.change_key("first")

    def change_key(self, name: str) -> None:
        self.name, self.key = name, ec.generate_private_key(ec.SECP256R1())
        public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key()))
        self.jwks = json.dumps({"keys": [{**public, "kid": name, "alg": "ES256", "use": "sig"}]}).encode()

    def token(self, **claims: object) -> str:
        usual = {"iss": "i", "aud": "a", "exp": time.time() + 60, "tenant": "acme"}
        return jwt.encode({**usual, **claims}, self.key, algorithm="ES256", headers={"kid": self.name})


@pytest.fixture
def issuer() -> Iterator[tuple[Issuer, str]]:
    """An issuer and the URL of its keys."""
    issuer = Issuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.num_fetches += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(issuer.jwks)

        def log_message(self, *args: object) -> None:
            """Write nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield issuer, f"http://127.0.0.1:{server.server_port}/jwks"
        server.shutdown()
        thread.join()


def wait_until_refused(tokens: TokenVerifier, token: str) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            tokens.identify(token)
        except Unauthenticated:
            return
        time.sleep(0.05)
    raise AssertionError("the token is still accepted")


def test_a_new_key_is_fetched_in_the_background_and_guessed_ids_fetch_no_more_often(issuer: tuple[Issuer, str]) -> None:
    issuing, url = issuer
    tokens = TokenVerifier(url, issuer="i", audience="a")
    assert tokens.identify(issuing.token(rights="generate operate fly")).rights == {"generate", "operate"}
    assert tokens.identify(issuing.token()).tenant == "acme"
    old = issuing.token()
    issuing.change_key("second")
    with pytest.raises(Unauthenticated, match="a key that is not known"):
        tokens.identify(issuing.token())
    wait_until_refused(tokens, old)
    assert tokens.identify(issuing.token()).tenant == "acme"
    issuing.change_key("third")
    for _ in range(20):
        with pytest.raises(Unauthenticated, match="a key that is not known"):
            tokens.identify(issuing.token())
    assert issuing.num_fetches == 2  # the third is ten seconds after the second


def test_a_withdrawn_key_is_refused_without_a_token_of_another_key(
    issuer: tuple[Issuer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_web_tokens, "_FRESH_S", 0.05)
    monkeypatch.setattr(json_web_tokens, "_MIN_INTERVAL_S", 0.01)
    issuing, url = issuer
    tokens = TokenVerifier(url, issuer="i", audience="a")
    old = issuing.token()
    assert tokens.identify(old).tenant == "acme"
    issuing.change_key("second")
    wait_until_refused(tokens, old)


def test_keys_that_have_not_been_fetched_for_long_are_not_believed(
    issuer: tuple[Issuer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    issuing, url = issuer
    tokens = TokenVerifier(url, issuer="i", audience="a")
    monkeypatch.setattr(json_web_tokens, "_MAX_AGE_S", 0.0)
    with pytest.raises(Unauthenticated, match="have not been fetched for long"):
        tokens.identify(issuing.token())


def test_keys_that_cannot_be_fetched_keep_a_service_from_starting() -> None:
    with pytest.raises(Unavailable, match=r"jwt_jwks: cannot fetch http://127\.0\.0\.1:1/jwks"):
        TokenVerifier("http://127.0.0.1:1/jwks", issuer="i", audience="a")
