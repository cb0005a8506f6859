"""JSON web tokens as credentials: signed by an issuer whose public keys are in a JWKS file or at a URL.

A token must name its issuer, this audience and its expiry, and be signed with an asymmetric algorithm. Its claim
`tenant` is the tenant, and `rights` the rights, as a list or as words (default: `generate`). Only this module loads
PyJWT (extra gateway or serve).
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import jwt

from specdec.access.grants import GENERATE, RIGHTS, Access
from specdec.access.watched_files import WatchedFile
from specdec.contract.errors import InvalidRequest, SpecdecError, Unauthenticated, Unavailable
from specdec.contract.tenant import check_tenant

#: Algorithms of signatures. `none` and those with a shared secret are left out: with HMAC, anyone who knows the public
#: key could sign.
ALGORITHMS = frozenset(
    (
        *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
        *("ES256", "ES384", "ES512", "EdDSA"),
    )
)

#: Least size of an RSA key (RFC 7518, section 3.3).
_MIN_RSA_BITS = 2048

_FIELD = "jwt_jwks"
_SCHEMES = ("https://", "http://")

#: Interval at which keys of a URL are fetched again, and the shortest one if a token names a key that is not known.
_FRESH_S = 300.0
_MIN_INTERVAL_S = 10.0
#: Age from which keys that cannot be fetched again are not believed any more.
_MAX_AGE_S = 3600.0
_FETCH_TIMEOUT_S = 5.0
_MAX_JWKS_BYTES = 1 << 20
_MAX_VERIFIED = 4096
#: Limits on what the log shows of keys that cannot be used.
_MAX_SHOWN_KEYS, _MAX_SHOWN_CHARACTERS = 5, 64

#: Tolerated difference between the issuer's clock and this one's.
_LEEWAY_S = 30.0

_log = logging.getLogger(__name__)


class PublicKey(NamedTuple):
    """A key that verifies tokens."""

    key: Any
    key_id: str
    """"" for a key without one. Several keys may have one id (RFC 7517, section 4.5)."""
    algorithms: frozenset[str]
    """Algorithms of its signatures."""


Keys = Sequence[PublicKey]
"""Public keys, in the order of their set."""


class _Verified(NamedTuple):
    """A token that was verified."""

    access: Access
    keys: Keys
    """Keys by which it was verified."""
    expires_at_s: float


class TokenVerifier:
    """Verifies tokens of one issuer. Any thread may call it."""

    def __init__(self, source: str, *, issuer: str, audience: str) -> None:
        """
        Args:
            source: JWKS file, or URL; keys of a URL are fetched now.
            issuer: claim `iss` that tokens must have.
            audience: claim `aud` that tokens must have.

        Raises:
            InvalidRequest: the file cannot be read, or holds no usable key.
            Unavailable: the URL does not answer.
        """
        self._issuer, self._audience = issuer, audience
        self._keys: _KeySource = _RemoteKeys(source) if source.startswith(_SCHEMES) else _FileKeys(Path(source))
        self._verified: dict[bytes, _Verified] = {}
        """Tokens that were verified, by their hash: a signature takes about a millisecond."""

    def identify(self, token: str) -> Access:
        """Return the access that a token grants.

        Raises:
            Unauthenticated: the token is malformed, expired or of another issuer or audience, or its signature is not
                valid. The message has no part of the token.
        """
        keys, digest = self._keys.current(), hashlib.sha256(token.encode(errors="replace")).digest()
        known = self._verified.get(digest)
        if known is not None and known.keys is keys and time.time() < known.expires_at_s:
            return known.access
        try:
            claims = self._claims(token, keys)
            verified = _Verified(_access(claims), keys, float(claims["exp"]) + _LEEWAY_S)
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise Unauthenticated(f"the token is not valid: {type(error).__name__}") from None
        if len(self._verified) >= _MAX_VERIFIED:
            self._verified.clear()
        self._verified[digest] = verified
        return verified.access

    def _claims(self, token: str, keys: Keys) -> Mapping[str, Any]:
        """Return the claims of a token whose signature and usual claims are valid."""
        header = jwt.get_unverified_header(token)
        algorithm = header.get("alg")
        if algorithm not in ALGORITHMS:
            raise Unauthenticated("the token is not signed with an algorithm that is accepted")
        chosen = _choose(keys, header.get("kid"))
        if not chosen:
            self._keys.note_unknown()
            raise Unauthenticated("the token is signed with a key that is not known")
        fitting = [key for key in chosen if algorithm in key.algorithms]
        if not fitting:
            raise jwt.InvalidAlgorithmError
        for key in fitting[:-1]:
            with suppress(jwt.InvalidSignatureError, jwt.InvalidKeyError):
                return self._claims_by(key, token, algorithm)
        return self._claims_by(fitting[-1], token, algorithm)

    def _claims_by(self, key: PublicKey, token: str, algorithm: str) -> Mapping[str, Any]:
        """Return the claims of a token that a key has signed, if they are valid."""
        return jwt.decode(
            token,
            key.key,
            algorithms=[algorithm],
            issuer=self._issuer,
            audience=self._audience,
            leeway=_LEEWAY_S,
            options={"require": ["exp", "iss", "aud"]},
        )


class _KeySource(Protocol):
    def current(self) -> Keys:
        """Return the keys; the same object until they change."""
        ...

    def note_unknown(self) -> None:
        """Note that a token names a key that is not among them."""
        ...


class _FileKeys:
    """Keys of a file, which is read again when it changes. Public keys may be read by anyone."""

    def __init__(self, path: Path) -> None:
        self._file = WatchedFile(path, _parse_jwks, field=_FIELD, is_private=False)

    def current(self) -> Keys:
        return self._file.content()

    def note_unknown(self) -> None:
        """The file is looked at once a second anyway."""


class _RemoteKeys:
    """Keys of a URL. A thread fetches them again at an interval, and soon if a token names one that is not known.

    So a key that the issuer has withdrawn is refused after the interval, also if no token came meanwhile.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._text = _fetch(url)
        self._keys = _parse_jwks(self._text)
        self._fetched_s = time.monotonic()
        self._wanted = threading.Event()
        threading.Thread(target=self._keep_fresh, name="fetch-jwks", daemon=True).start()

    def current(self) -> Keys:
        if time.monotonic() - self._fetched_s > _MAX_AGE_S:
            raise Unauthenticated("tokens cannot be verified: the keys of their issuer have not been fetched for long")
        return self._keys

    def note_unknown(self) -> None:
        self._wanted.set()

    def _keep_fresh(self) -> None:
        while True:
            self._wanted.wait(_FRESH_S)
            self._wanted.clear()
            try:
                self._take(_fetch(self._url))
                self._fetched_s = time.monotonic()
            except SpecdecError as error:
                _log.error("cannot fetch the keys of tokens again, keeping the old ones: %s", error)
            time.sleep(_MIN_INTERVAL_S)

    def _take(self, text: str) -> None:
        """Use the keys of a text; a set without any withdraws them all. Raises InvalidRequest unless it is a set."""
        if text == self._text:
            return
        try:
            self._keys = _parse_jwks(text)
        except _NoUsableKeyError as error:
            _log.error("every token is refused: %s", error)
            self._keys = ()
        self._text = text


class _NoUsableKeyError(InvalidRequest):
    """A set of keys has none that can verify tokens."""


class _NoPlaintext(urllib.request.HTTPRedirectHandler):
    """Follows redirections, but none from https:// to http://."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if req.full_url.startswith("https://") and not newurl.startswith("https://"):
            raise ValueError("it redirects to a URL without TLS")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _ShortKeyError(ValueError):
    """An RSA key has too few bits."""


def _choose(keys: Keys, key_id: object) -> Keys:
    """Return the keys that a token names; if it names none, those without an id, or the only one."""
    if key_id is None:
        return keys if len(keys) == 1 else [key for key in keys if not key.key_id]
    return [key for key in keys if key.key_id == key_id]


def _access(claims: Mapping[str, Any]) -> Access:
    tenant, rights = claims.get("tenant"), claims.get("rights", GENERATE)
    if not isinstance(tenant, str):
        raise Unauthenticated("the token has no claim tenant")
    try:
        check_tenant(tenant)
    except InvalidRequest as error:
        raise Unauthenticated(f"the token's claim {error.message}") from None
    words = rights.replace(",", " ").split() if isinstance(rights, str) else rights
    granted = RIGHTS.intersection(word for word in words if isinstance(word, str)) if isinstance(words, list) else ()
    return Access(tenant, frozenset(granted))


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Return what fetches a URL: directly from this machine, from others through a proxy that the environment names."""
    host = urlsplit(url).hostname or ""
    try:
        is_here = ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    direct = (urllib.request.ProxyHandler({}),) if is_here else ()
    return urllib.request.build_opener(_NoPlaintext, *direct)


def _fetch(url: str) -> str:
    """Return the text at a URL. Raises Unavailable."""
    try:
        with _opener(url).open(url, timeout=_FETCH_TIMEOUT_S) as answer:
            text: str = answer.read(_MAX_JWKS_BYTES + 1).decode()
    except (OSError, ValueError, HTTPException) as error:
        raise Unavailable(f"{_FIELD}: cannot fetch {url}: {error}", reason="REPLICA_UNAVAILABLE") from error
    return text[: _MAX_JWKS_BYTES + 1]


def _parse_jwks(text: str) -> Keys:
    """Return the public keys of a JWKS that may verify tokens, without those that cannot be used (RFC 7517, section 5).

    Raises InvalidRequest unless the text is such a set, and _NoUsableKeyError for a set without keys that can be used.
    """
    try:
        entries = list(json.loads(text)["keys"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{_FIELD}: not a JSON web key set: {type(error).__name__}", field=_FIELD) from None
    keys: list[PublicKey] = []
    left_out = []
    for entry in entries:
        try:
            stated = {name: value for name, value in entry.items() if value is not None}  # some issuers list all names
            if _may_verify(stated):
                keys.append(_public_key(stated))
        except Exception as error:  # whatever PyJWT and cryptography make of it, the other keys are good
            kid = entry.get("kid") if isinstance(entry, dict) else None
            left_out.append(f"{str(kid)[:_MAX_SHOWN_CHARACTERS]!r} ({type(error).__name__})")
    counts = f"{len(left_out)} of {len(entries)} keys cannot be used"
    shown = f"{counts} and are left out: {', '.join(left_out[:_MAX_SHOWN_KEYS])}" if left_out else ""
    if not keys:
        raise _NoUsableKeyError(
            f"{_FIELD}: the set has no public key of {', '.join(sorted(ALGORITHMS))}; {shown or counts}", field=_FIELD
        )
    if left_out:
        _log.warning("JWKS: %s", shown)
    return tuple(keys)


def _may_verify(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry is a public key for signatures; private and shared keys have no place in the set."""
    is_public = entry.get("kty") in ("RSA", "EC", "OKP") and "d" not in entry
    verifies = entry.get("use", "sig") == "sig" and "verify" in list(entry.get("key_ops", ("verify",)))
    return is_public and verifies and entry.get("alg", "RS256") in ALGORITHMS


def _public_key(entry: Mapping[str, Any]) -> PublicKey:
    """Return the key of an entry. Raises _ShortKeyError, or what PyJWT and cryptography make of a wrong one."""
    jwk = jwt.PyJWK(dict(entry))
    algorithms = {jwk.algorithm_name}  # stated, or that of the curve
    if entry["kty"] == "RSA":
        if jwk.key.key_size < _MIN_RSA_BITS:
            raise _ShortKeyError
        if "alg" not in entry:
            algorithms = {name for name in ALGORITHMS if name.startswith(("RS", "PS"))}
    return PublicKey(jwk.key, str(entry.get("kid") or ""), frozenset(algorithms))
