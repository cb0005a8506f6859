"""URLs of a Redis: a single server, a primary that Sentinels name, a Redis Cluster, or a store in this process.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB][?OPTION=VALUE&...]
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/SERVICE[/DB][?...]
    redis+cluster://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...][?...]
    unix://[USER:PASSWORD@]/PATH[?db=DB&...]
    memory://[NAME]

`rediss`, `rediss+sentinel` and `rediss+cluster` speak TLS. The options are those of redis-py that are listed below;
each is checked here, because redis-py takes any name and fails at the first command. `specdec.state.clients` opens
clients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from specdec.settings.addresses import join_address

SINGLE, SENTINEL, CLUSTER, UNIX, MEMORY = "single", "sentinel", "cluster", "unix", "memory"

_KINDS = {
    **dict.fromkeys(("redis", "rediss"), SINGLE),
    **dict.fromkeys(("redis+sentinel", "rediss+sentinel"), SENTINEL),
    **dict.fromkeys(("redis+cluster", "rediss+cluster"), CLUSTER),
    "unix": UNIX,
    "memory": MEMORY,
}

SCHEMES = tuple(_KINDS)

_DEFAULT_PORTS = {SINGLE: 6379, SENTINEL: 26379, CLUSTER: 6379}

_MAX_DB = 1 << 20
_SERVICE = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def _is_text(value: str) -> bool:
    return bool(value)


def _is_seconds(value: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", value) is not None and 0.0 < float(value) <= 86_400.0


def _is_count(value: str) -> bool:
    return value.isascii() and value.isdecimal() and int(value[:6]) > 0 and len(value) <= 6


def _is_database(value: str) -> bool:
    return value.isascii() and value.isdecimal() and len(value) <= 7 and int(value) <= _MAX_DB


def _is_truth(value: str) -> bool:
    return value.lower() in ("true", "false", "yes", "no", "1", "0", "on", "off", "t", "f", "y", "n")


_Check = tuple[Callable[[str], bool], str]
"""Tells whether an option has a good value, and what a good one is."""

_TEXT: _Check = (_is_text, "a value")
_SECONDS: _Check = (_is_seconds, "a number of seconds above 0")
_COUNT: _Check = (_is_count, "a number of 1 to 999999")

_OPTIONS: dict[str, _Check] = {
    "username": _TEXT,
    "password": _TEXT,
    "client_name": _TEXT,
    "socket_timeout": _SECONDS,
    "socket_connect_timeout": _SECONDS,
    "socket_keepalive": (_is_truth, "true or false"),
    "health_check_interval": _COUNT,
    "max_connections": _COUNT,
}
_DATABASE_OPTIONS: dict[str, _Check] = {"db": (_is_database, f"a number of 0 to {_MAX_DB}")}
_TLS_OPTIONS: dict[str, _Check] = {
    "ssl_ca_certs": _TEXT,
    "ssl_certfile": _TEXT,
    "ssl_keyfile": _TEXT,
    "ssl_cert_reqs": (lambda value: value in ("required", "optional", "none"), "required, optional or none"),
    "ssl_check_hostname": (_is_truth, "true or false"),
    "ssl_ciphers": _TEXT,
}
#: Options of the connections to Sentinels, which are not passed to the servers.
_SENTINEL_OPTIONS: dict[str, _Check] = {"sentinel_username": _TEXT, "sentinel_password": _TEXT}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The parts of a URL."""

    kind: str
    """SINGLE, SENTINEL, CLUSTER, UNIX or MEMORY."""
    is_tls: bool
    addresses: tuple[tuple[str, int], ...]
    """Host and port of the server, or of Sentinels, or of nodes of the cluster; empty for UNIX and MEMORY."""
    path: str
    """UNIX: path of the socket. MEMORY: name of the store. SENTINEL: name of the service. Else ""."""
    database: str
    """Number of the database as the path gives it, or ""."""
    user_info: str
    """USER:PASSWORD as the URL has it, with its escapes; "" if there is none."""
    options: tuple[tuple[str, str], ...]
    """Options of the servers' connections."""
    sentinel_options: tuple[tuple[str, str], ...]
    """Options of the Sentinels' connections, without their prefix."""
    place: str
    """The URL without user, password and options, which must not reach logs or clients."""

    def of_server(self, host: str, port: int) -> str:
        """Return the URL of one of the servers, as redis-py reads it."""
        return self._plain(host, port, self.user_info, self.options)

    def of_sentinel(self, host: str, port: int) -> str:
        """Return the URL of a Sentinel. It has the servers' TLS, and a user and a password of its own."""
        tls = tuple((name, value) for name, value in self.options if name in _TLS_OPTIONS)
        return self._plain(host, port, "", (*tls, *self.sentinel_options), database="")

    def _plain(
        self, host: str, port: int, user_info: str, options: Sequence[tuple[str, str]], database: str | None = None
    ) -> str:
        scheme = "rediss" if self.is_tls else "redis"
        user = f"{user_info}@" if user_info else ""
        chosen = self.database if database is None else database
        path = f"/{chosen}" if chosen else ""
        query = f"?{urlencode(options, quote_via=quote)}" if options else ""
        return f"{scheme}://{user}{join_address(host, port)}{path}{query}"


def parse_redis_url(url: str) -> RedisUrl:
    """Read a URL.

    Raises:
        ValueError: the URL is malformed. The message is one line without user, password and values of options, and
            continues a sentence that begins with the name of the setting.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("is not a URL") from None
    if "@" in parts.path + parts.query + parts.fragment:
        # Behind an unescaped / ? or # the rest of a password is read as another part, which messages would show.
        raise ValueError("has an @ behind the address: in a user or password, write / ? # @ as %2F %3F %23 %40")
    if parts.fragment:
        raise ValueError("has a part behind #")
    kind = _KINDS.get(parts.scheme)
    if kind is None:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES[:-1])
        raise ValueError(f"must begin with {schemes} or be memory://, not {_without_user(parts)!r}")
    user_info, _, hosts = parts.netloc.rpartition("@")
    is_tls = parts.scheme.startswith("rediss")
    path, database = _path(kind, parts.path)
    options = _checked_options(kind, is_tls, parts.query)
    return RedisUrl(
        kind=kind,
        is_tls=is_tls,
        addresses=tuple(_address(each, _DEFAULT_PORTS[kind]) for each in hosts.split(","))
        if kind in _DEFAULT_PORTS
        else (),
        path=hosts if kind == MEMORY else path,
        database=database,
        user_info=user_info,
        options=tuple(option for option in options if option[0] not in _SENTINEL_OPTIONS),
        sentinel_options=tuple(
            (name.removeprefix("sentinel_"), value) for name, value in options if name in _SENTINEL_OPTIONS
        ),
        place=_without_user(parts),
    )


def _without_user(parts: SplitResult) -> str:
    scheme = f"{parts.scheme}://" if parts.scheme else ""
    return f"{scheme}{parts.netloc.rpartition('@')[2]}{parts.path}"


def _address(text: str, default_port: int) -> tuple[str, int]:
    """Read HOST, HOST:PORT or [ADDRESS]:PORT. An empty host is this machine, as redis-py has it."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536) or (":" in host and not is_bracketed):
        raise ValueError(f"has an address that is not HOST:PORT with a port of 1 to 65535: {text!r}")
    return host.strip("[]") or "localhost", int(port)


def _path(kind: str, path: str) -> tuple[str, str]:
    """Return the path's own part (`RedisUrl.path`) and the database that it names."""
    if kind in (UNIX, MEMORY):
        if kind == UNIX and len(path) < 2:
            raise ValueError("has no path of a socket: unix:///PATH")
        return path, ""
    own, _, database = path.strip("/").partition("/") if kind == SENTINEL else ("", "", path.strip("/"))
    if kind == SENTINEL and not _SERVICE.fullmatch(own):
        raise ValueError("names no service: redis+sentinel://HOST:PORT/SERVICE, as `sentinel monitor SERVICE` has it")
    if kind == CLUSTER and database:
        raise ValueError("has a path, and a Redis Cluster has no databases: redis+cluster://HOST:PORT,HOST:PORT")
    if database and not _is_database(database):
        raise ValueError(f"has a database that is not a number of 0 to {_MAX_DB}: {database!r}")
    return own, database


def _checked_options(kind: str, is_tls: bool, query: str) -> list[tuple[str, str]]:
    known = {} if kind == MEMORY else {**_OPTIONS}
    if kind in (SINGLE, SENTINEL, UNIX):
        known |= _DATABASE_OPTIONS
    if kind == SENTINEL:
        known |= _SENTINEL_OPTIONS
    if is_tls:
        known |= _TLS_OPTIONS
    options = parse_qsl(query, keep_blank_values=True)
    for name, value in options:
        if name in _TLS_OPTIONS and not is_tls:
            raise ValueError(f"has the parameter {name!r}, which needs rediss:// or its Sentinel or Cluster form")
        if name not in known:
            listed = f"known are {', '.join(known)}" if known else "there are none"
            raise ValueError(f"has the unknown parameter {name[:64]!r}; {listed}")
        is_good, wanted = known[name]
        if not is_good(value):
            raise ValueError(f"has a parameter {name!r} that is not {wanted}")
    if len(dict(options)) < len(options):
        raise ValueError("has a parameter twice")
    return options
