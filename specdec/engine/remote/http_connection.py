"""HTTP connections to the engine's server that a replica's settings name.

Called by the targets and drafts whose engine is reached over HTTP; `pinned_model` sees to it that one model answers.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import httpx2

from specdec.access.watched_files import read_credentials
from specdec.contract.errors import Internal, InvalidSetting, Unavailable
from specdec.settings.engine_servers import EngineServerSettings

#: Length of a server's error message in ours.
_MAX_MESSAGE_CHARACTERS = 300

#: Attempts to send a request over connections that the server closes meanwhile.
_NUM_SENDINGS = 3

#: Longest answer that is read. The rows of a long prompt take a few megabytes.
_MAX_ANSWER_BYTES = 64 << 20

#: Connections that are kept open, and time after which an idle one is closed.
_NUM_KEPT, _IDLE_S = 256, 300.0

_log = logging.getLogger(__name__)


class Refused(Exception):
    """The server answered with a client error; the message is the server's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Connection:
    """A pool of keep-alive connections to one server. Use from one event loop."""

    def __init__(self, url: str, *, key: str = "", ca: str = "", timeout_s: float) -> None:
        """
        Args:
            url: base URL of the server, http:// or https://.
            key: key that the server wants as a bearer token; "" for none.
            ca: file with the certificates that sign the server's; "" for those of the system.
            timeout_s: time after which a request without an answer fails.

        Raises:
            InvalidSetting: the file of certificates cannot be read, or the key has other characters than ASCII.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        if not key.isascii():
            raise InvalidSetting("backend_key: the key must be ASCII", field="backend_key")
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            verify=_tls_context(ca) if ca else True,
            timeout=timeout_s,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=_NUM_KEPT, keepalive_expiry=_IDLE_S),
            trust_env=False,
        )
        self._since_s: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        """Time of the first answer over each open connection, by `time.monotonic`."""

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request, POST with a body and GET without one, and return the JSON of its answer.

        Raises:
            Refused: the server answered with a status of 400 to 499.
            Unavailable: no answer, or a status of 500 to 599.
            Internal: the answer is not JSON.
        """
        return json_of(await self.send(path, body), self.url)

    async def ask_text(self, path: str) -> str:
        """Return the text at a path. Raises as `ask`, but for JSON."""
        return (await self.send(path, None)).text

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._client.aclose()

    async def send(self, path: str, body: Mapping[str, Any] | None) -> httpx2.Response:
        """Send a request as `ask` does; return its answer."""
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._exchange(path, body)
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise Unavailable(f"{self.url} did not answer in time") from error
        except httpx2.TransportError as error:
            raise Unavailable(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        if response.status_code >= 500:
            _log.warning("the engine failed: status=%d message=%s", response.status_code, _message_of(response))
            raise Unavailable(f"{self.url} answered with status {response.status_code}")
        if response.status_code >= 400:
            raise Refused(response.status_code, _message_of(response))
        self._since_s.setdefault(response.extensions["network_stream"], time.monotonic())
        return response

    def since_s(self, response: httpx2.Response) -> float:
        """Return the time of the first answer over the connection of an answer of `send`."""
        return self._since_s[response.extensions["network_stream"]]

    async def _exchange(self, path: str, body: Mapping[str, Any] | None) -> httpx2.Response:
        """Send a request and read its answer.

        A server closes connections that were idle for some seconds, and may do so while a request is on its way. Such a
        request is repeated: no request changes what another one is answered.
        """
        for num_left in reversed(range(_NUM_SENDINGS)):
            try:
                async with self._client.stream("GET" if body is None else "POST", path, json=body) as streamed:
                    return await _read(streamed, self.url)
            except (httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
                if not num_left or isinstance(error, httpx2.ConnectError):
                    raise
        raise AssertionError("the last attempt returns or raises")


async def _read(streamed: httpx2.Response, url: str) -> httpx2.Response:
    """Return a response with its whole content. Raises Internal if it is longer than an answer may be."""
    content = bytearray()
    async for block in streamed.aiter_bytes():
        content += block
        if len(content) > _MAX_ANSWER_BYTES:
            raise Internal(f"{url} answered more than {_MAX_ANSWER_BYTES >> 20} MiB")
    return httpx2.Response(streamed.status_code, content=bytes(content), extensions=streamed.extensions)


def json_of(response: httpx2.Response, url: str) -> Any:
    """Return the JSON of a server's answer. Raises Internal if it is something else."""
    try:
        return response.json()
    except ValueError as error:
        raise Internal(f"{url} answered something else than JSON: {response.text[:80]!r}") from error


def _message_of(response: httpx2.Response) -> str:
    """Return the message of an error, which OpenAI's form has in `error.message`."""
    try:
        body = response.json()
        error = body.get("error", body)
        message = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = response.text
    return str(message)[:_MAX_MESSAGE_CHARACTERS]


def _tls_context(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidSetting(f"backend_ca: {ca} cannot be read: {error}", field="backend_ca") from error


OpenedT = TypeVar("OpenedT")

_ENVIRONMENT = "env:"


async def open_remote(
    settings: EngineServerSettings, environ: Mapping[str, str], open_engine: Callable[..., Awaitable[OpenedT]]
) -> OpenedT:
    """Connect to the server that the settings name, and return what `open_engine` makes of the connection.

    Args:
        settings: settings of the replica.
        environ: environment of the process, for a key of `env:NAME`.
        open_engine: checks the server, as `completions.open_completions`, whose arguments it takes. The connection is
            closed if it fails.

    Raises:
        InvalidRequest: a setting does not fit the server; the message names the flag to change.
        Unavailable: the server cannot be reached.
    """
    connection = Connection(
        settings.backend_url,
        key=_read_key(settings.backend_key, environ),
        ca=settings.backend_ca,
        timeout_s=settings.backend_timeout_s,
    )
    try:
        return await open_engine(
            connection,
            model=settings.model,
            served_name=settings.backend_model,
            max_context_tokens=settings.max_context_tokens,
        )
    except BaseException:
        await connection.close()
        raise


def _read_key(source: str, environ: Mapping[str, str]) -> str:
    """Return the key that a setting names: the first line of a file, or an environment variable for `env:NAME`.

    Raises:
        InvalidRequest: the file or the variable is missing; the message omits the key.
    """
    if not source:
        return ""
    if source.startswith(_ENVIRONMENT):
        name = source.removeprefix(_ENVIRONMENT)
        if not environ.get(name):
            raise InvalidSetting(f"backend_key: the environment variable {name} is not set", field="backend_key")
        return environ[name]
    text, _ = read_credentials(Path(source), field="backend_key")
    return text.split("\n", 1)[0].strip()
