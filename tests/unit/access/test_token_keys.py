"""Keys of an issuer at a URL: fetched at the start, at an interval, and for a token whose key is not known yet."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from specdec.access import json_web_tokens
from specdec.access.json_web_tokens import TokenVerifier
from specdec.contract.errors import Unauthenticated, Unavailable


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


#: Entries that a set may hold beside good ones: unknown, incomplete, out of range, or no keys at all.
UNUSABLE: dict[str, Any] = {
    "an unknown curve": {"kty": "EC", "crv": "P-999", "x": "AA", "y": "AA", "use": "sig"},
    "an unknown curve of OKP": {"kty": "OKP", "crv": "X99", "x": "AA"},
    "no curve": {"kty": "EC", "x": "AA", "y": "AA"},
    "no modulus": {"kty": "RSA", "e": "AQAB", "alg": "RS256"},
    "a modulus of zero": {"kty": "RSA", "e": "AQAB", "n": "AA"},
    "no base64": {"kty": "RSA", "e": "AQAB", "n": "\u00e4"},
    "a number as modulus": {"kty": "RSA", "e": "AQAB", "n": 5},
    "a point off the curve": {"kty": "EC", "crv": "P-256", "x": "A" * 43, "y": "A" * 43},
    "an algorithm of the other type": {"kty": "RSA", "e": "AQAB", "n": "AQAB", "alg": "ES256"},
    "a list as algorithm": {"kty": "EC", "crv": "P-256", "alg": ["ES256"]},
    "an unknown type": {"kty": "AKP", "alg": "ML-DSA-44", "pub": "AA"},
    "no type": {},
    "no object": "key",
    "null": None,
}


@pytest.mark.parametrize("entry", UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("has_same_id", [True, False])
def test_a_key_that_cannot_be_used_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, entry: Any, is_first: bool, has_same_id: bool
) -> None:
    issuing, path = Issuer(), tmp_path / "jwks"
    (good,) = json.loads(issuing.jwks)["keys"]
    bad = entry | {"kid": good["kid"] if has_same_id else "bad"} if isinstance(entry, dict) else entry
    path.write_text(json.dumps({"keys": [bad, good] if is_first else [good, bad]}))
    assert TokenVerifier(str(path), issuer="i", audience="a").identify(issuing.token()).tenant == "acme"
    if bad is not None and "kty" in bad and bad["kty"] != "AKP":
        assert "1 of 2 keys cannot be used and are left out" in caplog.text


def test_members_of_a_key_that_are_null_are_absent(tmp_path: Path) -> None:
    issuing, path = Issuer(), tmp_path / "jwks"
    (good,) = json.loads(issuing.jwks)["keys"]
    unset = dict.fromkeys(("alg", "use", "key_ops", "d", "p", "q", "k", "crv", "x5c", "x5t"))
    path.write_text(json.dumps({"keys": [unset | good]}))
    assert TokenVerifier(str(path), issuer="i", audience="a").identify(issuing.token()).tenant == "acme"


def public_entry(key: Any, **members: Any) -> dict[str, Any]:
    kinds: dict[Any, Any] = {
        rsa.RSAPrivateKey: jwt.algorithms.RSAAlgorithm, ec.EllipticCurvePrivateKey: jwt.algorithms.ECAlgorithm,
        ed25519.Ed25519PrivateKey: jwt.algorithms.OKPAlgorithm,
    }  # fmt: skip
    algorithm = next(kind for type_, kind in kinds.items() if isinstance(key, type_))
    return {**json.loads(algorithm.to_jwk(key.public_key())), "key_ops": ["verify"], **members}


def usual_token(key: Any, algorithm: str, **headers: str) -> str:
    claims = {"iss": "i", "aud": "a", "exp": time.time() + 60, "tenant": "acme"}
    return jwt.encode(claims, key, algorithm=algorithm, headers=headers)


@pytest.mark.parametrize("members", [{}, {"kid": "k"}], ids=["without an id", "with one id"])
def test_keys_that_share_an_id_all_verify_the_tokens_that_their_type_fits(
    tmp_path: Path, members: dict[str, str]
) -> None:
    signers = [
        (ec.generate_private_key(ec.SECP256R1()), "ES256"), (rsa.generate_private_key(65537, 2048), "RS256"),
        (ec.generate_private_key(ec.SECP256R1()), "ES256"), (rsa.generate_private_key(65537, 2048), "PS512"),
        (ed25519.Ed25519PrivateKey.generate(), "EdDSA"), (ec.generate_private_key(ec.SECP384R1()), "ES384"),
    ]  # fmt: skip
    path = tmp_path / "jwks"
    path.write_text(json.dumps({"keys": [public_entry(key, **members) for key, _ in signers]}))
    tokens = TokenVerifier(str(path), issuer="i", audience="a")
    for key, algorithm in signers:
        assert tokens.identify(usual_token(key, algorithm, **members)).tenant == "acme"
    for stranger, algorithm in (
        (ec.generate_private_key(ec.SECP256R1()), "ES256"), (rsa.generate_private_key(65537, 2048), "RS256"),
        (ed25519.Ed25519PrivateKey.generate(), "EdDSA"),
    ):  # fmt: skip
        with pytest.raises(Unauthenticated, match="InvalidSignatureError"):
            tokens.identify(usual_token(stranger, algorithm, **members))


@pytest.mark.parametrize(
    ("members", "bits"),
    [({"key_ops": ["encrypt"]}, 2048), ({"key_ops": []}, 2048), ({"key_ops": ["sign"]}, 2048), ({"use": "Enc"}, 2048),
     ({"use": "tls"}, 2048), ({}, 1024)],
)  # fmt: skip
def test_a_key_that_is_not_for_signatures_or_too_short_is_left_out(
    tmp_path: Path, members: dict[str, Any], bits: int
) -> None:
    issuing, path, key = Issuer(), tmp_path / "jwks", rsa.generate_private_key(65537, bits)
    (good,) = json.loads(issuing.jwks)["keys"]
    path.write_text(json.dumps({"keys": [public_entry(key, kid="bad", **members), good]}))
    tokens = TokenVerifier(str(path), issuer="i", audience="a")
    assert tokens.identify(issuing.token()).tenant == "acme"
    with pytest.raises(Unauthenticated, match="a key that is not known"):
        tokens.identify(usual_token(key, "RS256", kid="bad"))


@pytest.mark.parametrize("remaining", ["good", "none"])
def test_a_key_that_cannot_be_used_does_not_keep_a_withdrawn_key_alive(
    issuer: tuple[Issuer, str], monkeypatch: pytest.MonkeyPatch, remaining: str
) -> None:
    monkeypatch.setattr(json_web_tokens, "_FRESH_S", 0.05)
    monkeypatch.setattr(json_web_tokens, "_MIN_INTERVAL_S", 0.01)
    issuing, url = issuer
    tokens = TokenVerifier(url, issuer="i", audience="a")
    old = issuing.token()
    assert tokens.identify(old).tenant == "acme"
    issuing.change_key("second")
    keys = json.loads(issuing.jwks)["keys"] if remaining == "good" else []
    issuing.jwks = json.dumps({"keys": [UNUSABLE["an unknown curve"], *keys]}).encode()
    wait_until_refused(tokens, old)
    if remaining == "good":
        assert tokens.identify(issuing.token()).tenant == "acme"


def test_keys_on_this_machine_are_fetched_without_a_proxy(
    issuer: tuple[Issuer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    issuing, url = issuer
    assert TokenVerifier(url, issuer="i", audience="a").identify(issuing.token()).tenant == "acme"
