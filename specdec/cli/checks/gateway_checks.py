"""Checks of an HTTP gateway: that it lives, is ready, lists its model, and completes a prompt on this system.

Certificates are verified with the authorities of `--tls-ca` and those of this machine, because an ingress may have one
of a public authority.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any
from urllib.parse import urlsplit

from specdec.cli.checks.finding import Finding, fail, ok, warn
from specdec.cli.checks.redis_checks import clock_finding
from specdec.cli.checks.system import System
from specdec.client import Tls
from specdec.contract.errors import Forbidden, NotFound, SpecdecError, Unauthenticated
from specdec.contract.version import __version__, build_of

_TIMEOUT_S = 20.0
_MAX_ANSWER_BYTES = 1 << 20
_MAX_SHOWN = 200
_NUM_TOKENS = 4
#: A date in HTTP has whole seconds.
_DATE_RESOLUTION_S = 1.0
_REFUSED = (401, 403)


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """A gateway, and what a caller needs to be answered there."""

    url: str
    api_key: str | None = None
    tls: Tls | None = None
    """Files of authorities and of this caller's certificate; None: those of this machine, and no certificate."""


class _Refused(Exception):
    """An answer with a status of failure; its text is the gateway's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def check_gateway(gateway: GatewayAddress, system: System) -> Iterator[Finding]:
    """Ask a gateway for its health, its models and a completion, and whether `system` knows the session of that."""
    where = gateway.url
    try:
        asked_s = time()
        _, headers = _call(gateway, "/health")
        answered_s = time()
    except ssl.SSLCertVerificationError as error:
        yield fail("gateway", f"{where}: its certificate is refused: {error.verify_message}",
                   "renew it, or give --tls-ca of its authority")  # fmt: skip
        return
    except (OSError, http.client.HTTPException, _Refused) as error:
        yield fail("gateway", f"{where} does not answer: {_words(error)}", "start it, or correct --http")
        return
    if date := headers.get("date"):
        shown_s = parsedate_to_datetime(date).timestamp() + _DATE_RESOLUTION_S / 2
        skew_s = shown_s - (asked_s + answered_s) / 2
        yield clock_finding(f"{where} is", skew_s, uncertain_s=_DATE_RESOLUTION_S)
    with _failures(where) as failures:
        _call(gateway, "/ready")
    yield from failures
    if failures:
        return
    with _failures(where) as failures:
        yield _version(where, _call(gateway, "/version")[0])
        model, vocabulary_size = _first_model(_call(gateway, "/v1/models")[0])
        prompt = [vocabulary_size // 2, vocabulary_size // 3]  # ids that every tokenizer has
        wanted = {"model": model, "prompt": prompt, "max_tokens": _NUM_TOKENS, "temperature": 0}
        done, _ = _call(gateway, "/v1/completions", wanted)
        yield from _same_system(gateway, system, str(done.get("session_id", "")))
        yield ok("gateway", f"{where} serves {model}, and completed a prompt")
    yield from failures


@contextlib.contextmanager
def _failures(where: str) -> Iterator[list[Finding]]:
    """Give a list to which a failure is added if the block's call is refused."""
    failures: list[Finding] = []
    try:
        yield failures
    except _Refused as error:
        advice = "give --api-key of a key that it knows" if error.status in _REFUSED else "see the coordinator's checks"
        failures.append(fail("gateway", f"{where} answers {error.status}: {error}", advice))
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        failures.append(fail("gateway", f"{where}: {_words(error)}", "look at its log"))


def _call(
    gateway: GatewayAddress, path: str, body: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], http.client.HTTPMessage]:
    """Return the JSON object and the headers of an answer.

    Raises:
        _Refused: the status is one of failure.
        OSError, HTTPException: there is no answer.
        ValueError: the answer is something else than a JSON object.
    """
    url = urlsplit(gateway.url)
    if url.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            url.hostname or "", url.port, timeout=_TIMEOUT_S, context=_context(gateway.tls)
        )
    else:
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=_TIMEOUT_S)
    with contextlib.closing(connection):
        headers = {"content-type": "application/json"}
        if gateway.api_key:
            headers["authorization"] = f"Bearer {gateway.api_key}"
        text = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", f"{url.path.rstrip('/')}{path}", text, headers)
        answer = connection.getresponse()
        content = answer.read(_MAX_ANSWER_BYTES)
    if not 200 <= answer.status < 300:
        raise _Refused(answer.status, _message_of(content))
    parsed = json.loads(content)
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} answers with something else than a JSON object")
    return parsed, answer.headers


def _context(tls: Tls | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if tls is not None and tls.ca:
        context.load_verify_locations(tls.ca)
    if tls is not None and tls.cert:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def _message_of(content: bytes) -> str:
    """Return the message of an error object, or the beginning of another text."""
    text = content.decode(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:_MAX_SHOWN] or "no text"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _version(where: str, answer: Mapping[str, Any]) -> Finding:
    version, build = str(answer.get("version")), str(answer.get("build", ""))
    advice = "give all services one image or one wheel, and run the doctor of the same version"
    if version != __version__:
        return warn("gateway", f"{where} runs specdec {version}, and this is {__version__}", advice)
    if build != build_of("gateway"):
        return warn("gateway", f"{where} runs specdec {version} of other sources than this doctor", advice)
    return ok("gateway", f"{where} runs specdec {version}, build {build}")


def _first_model(answer: Mapping[str, Any]) -> tuple[str, int]:
    """Return name and vocabulary size of a model. Raises ValueError, LookupError or TypeError for another answer."""
    model = answer["data"][0]
    return str(model["id"]), int(model["specdec"]["vocabulary_size"])


def _same_system(gateway: GatewayAddress, system: System, session_id: str) -> Iterator[Finding]:
    """Yield a failure if the coordinator does not know the session of a completion; then remove the session."""
    endpoint = system.addresses.endpoint
    if system.info is None or not session_id or not _shares_tenants(gateway, system):
        return
    try:
        with system.addresses.connect(endpoint) as client:
            client.get_session(session_id)
            client.delete_session(session_id)
    except NotFound:
        yield fail("gateway", f"{gateway.url} serves another system than the coordinator at {endpoint}: its session "
                   "is not known there", "give both one --redis-url and one --cluster, or correct --http and "
                   "--endpoint")  # fmt: skip
    except SpecdecError as error:
        yield warn("gateway", f"the session of its completion cannot be read: {error.message}",
                   "see the coordinator's checks")  # fmt: skip


def _shares_tenants(gateway: GatewayAddress, system: System) -> bool:
    """Return whether this caller has one tenant at the gateway and at the coordinator: no key, or a key at both."""
    if not gateway.api_key:
        return not system.addresses.has_credential
    try:
        with system.addresses.connect(system.addresses.endpoint, has_key=False) as client:
            client.info()
    except (Unauthenticated, Forbidden):
        return True
    except SpecdecError:
        return False
    return False  # the coordinator takes the key for none, and the gateway's tenant may be another
