"""The embedded store of `specdec up` against other programs on the machine, over raw connections."""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from specdec.state.embedded import EmbeddedRedis

NOBODY = 65534


@pytest.fixture
def store() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as store:
        yield store


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10)
        connection.connect(parts.path)
        return connection
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def pack(*fields: str | bytes) -> bytes:
    encoded = [field.encode() if isinstance(field, str) else field for field in fields]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(field), field) for field in encoded)


def ask(store: EmbeddedRedis, *commands: bytes) -> list[bytes]:
    """Return the first bytes of each answer; b"" if the store closed the connection."""
    with closing(connect(store.url)) as connection:
        answers = []
        for command in commands:
            try:
                connection.sendall(command)
                answers.append(connection.recv(1 << 16))
            except (BrokenPipeError, ConnectionResetError):
                answers.append(b"")
        return answers


class Intrusion:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.path), "w"))


def pickled(marker: Path) -> bytes:
    payload = pickle.dumps(Intrusion(marker))
    return hashlib.sha1(payload).digest() + payload


def intrusions(marker: Path) -> dict[str, list[bytes]]:
    """Return lists of commands, each of which would create the file `marker` in a different way."""
    by_python = f"return tostring(python.eval(\"open('{marker}', 'w')\"))"
    by_io = f"local file = io.open('{marker}', 'w') file:close() return 1"
    by_os = f"return os.execute('touch {marker}')"
    by_call = f"return tostring(redis.call.__globals__['os'].system('touch {marker}'))"
    sha = hashlib.sha1(by_python.encode()).hexdigest()
    library = f"#!lua name=mylib\nredis.register_function('f', function() {by_io} end)"
    return {
        "EVAL of python": [pack("EVAL", by_python, "0")],
        "eval in small letters": [pack("eVaL", by_python, "0")],
        "EVAL of io": [pack("EVAL", by_io, "0")],
        "EVAL of os": [pack("EVAL", by_os, "0")],
        "EVAL through redis.call": [pack("EVAL", by_call, "0")],
        "EVAL_RO": [pack("EVAL_RO", by_python, "0")],
        "SCRIPT LOAD and EVALSHA": [pack("SCRIPT", "LOAD", by_python), pack("EVALSHA", sha, "0")],
        "in a transaction": [pack("MULTI"), pack("EVAL", by_python, "0"), pack("EXEC")],
        "a library": [pack("FUNCTION", "LOAD", library), pack("FCALL", "f", "0")],
        "a pickle": [pack("RESTORE", "key", "0", pickled(marker))],
        "an ACL file": [pack("CONFIG", "SET", "aclfile", str(marker)), pack("ACL", "SAVE")],
        "another user": [pack("AUTH", "x", ""), pack("EVAL", by_python, "0")],
    }


@pytest.mark.parametrize("way", intrusions(Path("/")))
def test_no_command_runs_code_or_writes_a_file(store: EmbeddedRedis, tmp_path: Path, way: str) -> None:
    marker = tmp_path / "intruded"
    answers = ask(store, *intrusions(marker)[way])
    assert [answer[:1] for answer in answers] == [b"-"] * len(answers), answers
    assert not marker.exists()
    assert ask(store, pack("PING")) == [b"+PONG\r\n"]


@pytest.mark.parametrize("way", ["EVAL of python", "EVAL of io", "EVAL of os", "EVAL through redis.call"])
def test_not_even_an_own_script_can_reach_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The list of scripts is the first defence, and the content of Lua the second."""
    from specdec.state import embedded_server

    marker = tmp_path / "intruded"
    script = intrusions(marker)[way][0].split(b"\r\n")[4]
    monkeypatch.setattr(embedded_server, "own_scripts", lambda: {script})
    with EmbeddedRedis() as store:
        sha = hashlib.sha1(script).hexdigest()
        loaded, answer = ask(store, pack("SCRIPT", "LOAD", script), pack("EVALSHA", sha, "0"))
    assert loaded[:1] == b"$" or loaded == b"+" + sha.encode() + b"\r\n"
    assert answer[:1] == b"-", answer
    assert not marker.exists()


def test_lua_has_only_the_functions_that_the_scripts_need(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.state import embedded_server

    probes = [
        b"return type(%s)" % name
        for name in b"python os io package require module debug load loadstring loadfile dofile pcall xpcall "
        b"coroutine getfenv setfenv getmetatable setmetatable rawget rawset newproxy cjson _G next".split()
    ]
    monkeypatch.setattr(embedded_server, "own_scripts", lambda: set(probes))
    with EmbeddedRedis() as store:
        for probe in probes:
            _, answer = ask(store, pack("SCRIPT", "LOAD", probe), pack("EVALSHA", hashlib.sha1(probe).hexdigest(), "0"))
            assert b"nil" in answer, (probe, answer)


@pytest.mark.parametrize(
    "garbage",
    [
        b"EVAL 1 0\r\n",
        b"\x00" * 4096,
        b"*-1\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n$99999999999\r\n",
        b"*99999999\r\n",
        b"*1\r\n$x\r\n",
        b"*1\r\n$" + b"9" * 10_000 + b"\r\n",
        pack(b"\xff\xfe"),
        pack(),
    ],
)
def test_malformed_bytes_end_only_their_own_connection(
    store: EmbeddedRedis, garbage: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(connect(store.url)) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # the store closed the connection early
            while connection.recv(1 << 16):
                pass
    assert ask(store, pack("PING")) == [b"+PONG\r\n"]
    assert capfd.readouterr().err == ""


def test_a_refused_command_does_not_affect_the_other_commands_of_a_pipeline(store: EmbeddedRedis) -> None:
    with closing(connect(store.url)) as connection:
        connection.sendall(pack("SET", "a", "1") + pack("EVAL", "return 1", "0") + pack("GET", "a"))
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    assert received.startswith(b"+OK\r\n-")
    assert received.endswith((b"+1\r\n", b"$1\r\n1\r\n"))


@pytest.mark.parametrize("protocol", [2, 3])
def test_an_ordinary_client_connects_by_the_url(store: EmbeddedRedis, protocol: int) -> None:
    with redis.Redis.from_url(f"{store.url}?protocol={protocol}") as client:
        client.set("a", "1")
        assert client.get("a") == b"1"
    with redis.Redis.from_url(store.url, db=3) as client:
        assert client.get("a") is None


def test_the_socket_lies_in_a_private_folder_and_is_removed_with_the_store() -> None:
    before = os.umask(0)
    try:
        with EmbeddedRedis() as store:
            path = Path(urlsplit(store.url).path)
            folder = path.parent.stat()
            assert stat.S_IMODE(folder.st_mode) == 0o700
            assert folder.st_uid == os.geteuid()
            assert stat.S_ISSOCK(path.stat().st_mode)
    finally:
        os.umask(before)
    assert not path.parent.exists()


def test_the_end_of_the_store_ends_its_connections(store: EmbeddedRedis) -> None:
    with EmbeddedRedis() as other:
        connection = connect(other.url)
        connection.sendall(pack("PING"))
        assert connection.recv(100) == b"+PONG\r\n"
    with closing(connection):
        assert connection.recv(100) == b""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="sd-", dir="/tmp") as folder:
        yield Path(folder)


def test_the_folder_of_a_killed_store_is_removed_by_the_next_one_and_a_live_one_stays(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    program = (
        "import os, signal, specdec.state.embedded as e\n"
        "e.EmbeddedRedis().__enter__()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    (left,) = short_folder.iterdir()
    with EmbeddedRedis():
        assert left.exists()  # its store may be about to listen
    os.utime(left, (0, 0))
    with EmbeddedRedis() as first:
        assert not left.exists()
        os.utime(Path(urlsplit(first.url).path).parent, (0, 0))
        with EmbeddedRedis():
            assert ask(first, pack("PING")) == [b"+PONG\r\n"]
    assert list(short_folder.iterdir()) == []


def test_only_folders_of_dead_stores_of_this_user_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "redis.sock").write_text("not a socket")
    (tmp_path / "specdec-store-link").symlink_to(precious)
    full = tmp_path / "specdec-store-full"
    full.mkdir()
    (full / "redis.sock").touch()
    (full / "notes.txt").write_text("mine")
    os.utime(precious, (0, 0))
    os.utime(full, (0, 0))
    with EmbeddedRedis():
        pass
    assert (precious / "redis.sock").read_text() == "not a socket"
    assert (full / "notes.txt").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_another_user_of_the_machine_cannot_connect(store: EmbeddedRedis) -> None:
    program = (
        "import socket, sys\n"
        "connection = socket.socket(socket.AF_UNIX)\n"
        "try:\n    connection.connect(sys.argv[1])\n"
        "except PermissionError:\n    print('refused')\n"
        "else:\n    connection.sendall(b'*1\\r\\n$4\\r\\nPING\\r\\n')\n    print(connection.recv(100))\n"
    )
    result = subprocess.run(
        ["/usr/bin/env", "python3", "-c", program, urlsplit(store.url).path],
        user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", env={"PATH": os.defpath},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.stdout, result.stderr) == ("refused\n", "")
