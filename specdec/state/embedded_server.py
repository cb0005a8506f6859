"""The server of the embedded store: `fakeredis` on a Unix socket, limited to specdec's scripts and plain commands.

`fakeredis` is made for tests and trusts its clients: its Lua can call into Python, RESTORE unpickles, and ACL SAVE
writes to any path. Every command is therefore checked here before `fakeredis` sees it, and commands that are not on the
list are refused. As a second defence its Lua interpreter keeps only the functions that specdec's scripts call.
`embedded` creates the socket.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from functools import cache
from importlib import resources
from io import BufferedIOBase
from itertools import count
from pathlib import Path
from typing import Any

from fakeredis import FakeRedis, TcpFakeServer
from fakeredis._clients._tcp_server import TCPFakeRequestHandler
from redis.exceptions import RedisError, ResponseError

from specdec.state.clients import REDIS_VERSION
from specdec.state.script_runner import script_text

#: Commands that only touch keys, and those that clients send when they connect. None of them blocks, subscribes or
#: queues: each is answered before the next is read.
_COMMANDS = frozenset(
    b"ping echo hello select dbsize flushall flushdb time evalsha exists type ttl pttl expire pexpire persist del "
    b"unlink keys scan get set append strlen getrange setrange hget hset hsetnx hmget hdel hlen hkeys hgetall "
    b"zadd zrem zcard zrange zscore zrangebyscore xadd xlen xrange".split()
)
_SUBCOMMANDS = {
    b"client": frozenset((b"setinfo", b"setname", b"getname", b"list", b"id")),
    b"script": frozenset((b"load", b"exists", b"flush")),
}

#: Limits of one command; a prompt of the longest context has a few MB.
_MAX_FIELDS = 1 << 16
_MAX_FIELD_BYTES = 64 << 20
_MAX_HEADER_BYTES = 32
_MAX_LINE_BYTES = 1 << 10

_STRIP_LUA = """
local call, globals = redis.call, _G
-- fakeredis itself collects garbage by name after every script.
local kept = {
  tonumber = 1, tostring = 1, type = 1, ipairs = 1, pairs = 1, unpack = 1, collectgarbage = 1, KEYS = 1, ARGV = 1,
}
local tables = {
  redis = { call = function(...) return call(...) end, status_reply = function(text) return { ok = text } end },
  string = { format = string.format, match = string.match },
  math = { floor = math.floor, max = math.max },
  table = { sort = table.sort },
}
getmetatable('').__index = tables.string
for name in next, globals do
  if not kept[name] then
    globals[name] = tables[name]
  end
end
"""


class EmbeddedServer(TcpFakeServer):
    """Listens from construction on and answers within `serve_forever`, with one thread per connection."""

    address_family = socket.AF_UNIX
    #: Limit of connections that wait to be accepted. A Unix socket refuses further ones, whereas TCP lets them wait.
    request_queue_size = 1024

    def __init__(self, path: Path) -> None:
        """Create a Unix socket and listen on it.

        Raises:
            OSError: the socket cannot be created there.
        """
        self._ids = count(1)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(str(path), server_version=REDIS_VERSION)  # type: ignore[arg-type]
        self.RequestHandlerClass = _Connection
        # A client that never disconnects must not keep the process alive.
        self.daemon_threads = True
        _strip_lua(self.fake_server)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, _ = super().get_request()
        with self._lock:
            self._open.add(connection)
        # fakeredis distinguishes clients by their address, and clients of a Unix socket have none.
        return connection, ("unix", next(self._ids))

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def shutdown(self) -> None:
        """End `serve_forever` and every connection."""
        super().shutdown()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Malformed(Exception):
    """A client sent bytes that are not a command; nothing after them can be read."""


class _Connection(TCPFakeRequestHandler):
    """One client."""

    def handle(self) -> None:
        self.connection.setblocking(True)
        # An OSError means that the client has disconnected or the server ends.
        with suppress(OSError):
            try:
                while (command := _read_command(self.rfile)) is not None:
                    self._send(self._answer(command))
            except _Malformed as error:
                self.writer.dump(ResponseError(f"Protocol error: {error}"))

    def _send(self, answer: Any) -> None:
        """Send an answer. Long texts are sent with their length, because fakeredis would send them as lines, and
        readers limit the length of a line."""
        if isinstance(answer, bytes) and len(answer) > _MAX_LINE_BYTES:
            self.writer.write(b"$%d\r\n%b\r\n" % (len(answer), answer))
            self.wfile.flush()
        else:
            self.writer.dump(answer)

    def _answer(self, command: list[bytes]) -> Any:
        refusal = _refusal(command)
        if refusal is not None:
            return ResponseError(refusal)
        try:
            self.current_client.get_socket().sendall(_pack(command))
            return self.current_client.read_response()
        except RedisError as error:
            return error


def _refusal(command: list[bytes]) -> str | None:
    """Return why a command is refused, or None if it may run."""
    name = command[0].lower()
    subcommand = command[1].lower() if len(command) > 1 else b""
    if name not in _COMMANDS and subcommand not in _SUBCOMMANDS.get(name, ()):
        return "this store does not run this command"
    if (name, subcommand) == (b"script", b"load") and not own_scripts().issuperset(command[2:]):
        return "this store runs only specdec's own scripts"
    return None


@cache
def own_scripts() -> frozenset[bytes]:
    """Return the text of every script in `scripts/`."""
    folder = resources.files("specdec.state") / "scripts"
    names = (entry.name.removesuffix(".lua") for entry in folder.iterdir() if entry.name.endswith(".lua"))
    return frozenset(script_text(name).encode() for name in names)


def _strip_lua(fake_server: Any) -> None:
    """Remove from the Lua interpreter everything that leads out of it. Raises if the interpreter does not exist."""
    with FakeRedis(server=fake_server, protocol=2) as client:
        client.eval("return 1", 0)  # creates the interpreter
        client.script_flush()
    fake_server._lua_runtime.execute(_STRIP_LUA)


def _read_command(file: BufferedIOBase) -> list[bytes] | None:
    """Return the fields of the next command, at least one; None at the end of the connection.

    Raises:
        _Malformed: the bytes are not a command, or exceed the limits.
    """
    fields: list[bytes] = []
    while not fields:
        num_fields = _read_number(file, b"*", _MAX_FIELDS)
        if num_fields is None:
            return None
        for _ in range(num_fields):
            num_bytes = _read_number(file, b"$", _MAX_FIELD_BYTES)
            field = b"" if num_bytes is None else file.read(num_bytes + 2)
            if num_bytes is None or len(field) != num_bytes + 2 or field[-2:] != b"\r\n":
                raise _Malformed("a field is cut off")
            fields.append(field[:-2])
    return fields


def _read_number(file: BufferedIOBase, kind: bytes, largest: int) -> int | None:
    header = file.readline(_MAX_HEADER_BYTES)
    if not header:
        return None
    digits = header[1:-2]
    if header[:1] != kind or header[-2:] != b"\r\n" or not digits.isdigit() or int(digits) > largest:
        raise _Malformed(f"expected {kind.decode()} and a number of at most {largest}")
    return int(digits)


def _pack(command: list[bytes]) -> bytes:
    parts = [b"*%d\r\n" % len(command)]
    for field in command:
        parts += (b"$%d\r\n" % len(field), field, b"\r\n")
    return b"".join(parts)
