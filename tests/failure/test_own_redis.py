"""The Redis that `specdec up` starts: when it is used, and that it ends with its owner in every case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from specdec.client import Client
from specdec.contract.errors import NotFound, Unsupported
from specdec.state.connection import RedisConnection
from specdec.state.embedded import EmbeddedRedis
from specdec.state.own_redis import OwnRedis, installed_redis, throwaway_redis
from tests.support.up_rig import ENVIRON, start_up, store_of, wait_until_gone


def server_of(url: str) -> int:
    """Return the id of the process that serves a URL."""
    with redis.Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


@pytest.fixture
def program() -> str:
    program = installed_redis()
    if program is None:
        pytest.skip("no redis-server 7 is installed")
    return program


def test_it_serves_only_its_user_and_leaves_no_files(program: str) -> None:
    with throwaway_redis() as store:
        assert isinstance(store, OwnRedis)
        path = Path(urlsplit(store.url).path)
        pid = server_of(store.url)
        assert path.parent.stat().st_mode & 0o077 == 0
        with redis.Redis.from_url(store.url) as client:
            client.set("key", "value")
            assert (client.config_get("save"), client.config_get("appendonly")) == ({"save": ""}, {"appendonly": "no"})
            assert client.config_get("port") == {"port": "0"}
        assert list(path.parent.iterdir()) == [path]
    wait_until_gone([pid])
    assert not path.parent.exists()


def test_it_ends_when_its_owner_is_killed(program: str) -> None:
    words = (
        "import sys, time, specdec.state.own_redis as o\n"
        "with o.throwaway_redis() as store:\n"
        "    print(store.url, flush=True)\n"
        "    time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    url = owner.stdout.readline().strip()
    pid = server_of(url)
    keeper = psutil.Process(pid).ppid()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until_gone([pid])
    wait_until_gone([keeper])
    owner.stdout.close()
    path = Path(urlsplit(url).path)
    path.unlink()
    path.parent.rmdir()


def test_it_starts_again_at_the_same_address(program: str) -> None:
    with OwnRedis(program) as store:
        url = store.url
        os.kill(server_of(url), signal.SIGKILL)
        deadline_s = time.monotonic() + 10
        while store.is_alive:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        store.start()
        assert store.url == url
        assert server_of(url)


@pytest.mark.parametrize(
    "words",
    [
        "",
        'echo "Redis server v=6.2.7 sha=00000000:0"',
        'echo "something else"',
        '[ "$1" = --version ] && echo "Redis server v=7.0.0" || exit 1',
    ],
    ids=["none", "too old", "another program", "does not start"],
)
def test_without_a_suitable_redis_server_the_store_is_embedded(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words:
        (tmp_path / "redis-server").write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / "redis-server").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with throwaway_redis() as store:
        assert isinstance(store, EmbeddedRedis)
        with redis.Redis.from_url(store.url) as client:
            assert client.ping()


def test_up_without_redis_server_and_without_fakeredis_names_both_remedies(tmp_path: Path) -> None:
    program = "import sys; sys.modules['fakeredis'] = None; from specdec.cli.__main__ import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "up", "--listen", "127.0.0.1:0"],
        capture_output=True, text=True, env=ENVIRON | {"PATH": str(tmp_path)}, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "error: without redis-server 7 or later, the store of `specdec up` needs the "
        "package fakeredis, which is not installed: install redis-server 7 or later, or run pip install "
        '"specdec-serving[embedded]" (UNSUPPORTED)'
    )


def test_a_memory_url_without_fakeredis_names_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fakeredis", None)
    with pytest.raises(Unsupported, match=r'give --redis-url .*, or run pip install "specdec-serving\[embedded\]"'):
        RedisConnection("memory://")


def test_up_reports_that_its_store_has_ended_and_continues_with_an_empty_one(program: str) -> None:
    up, endpoint = start_up()
    ask = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    try:
        with Client(endpoint) as client:
            before = client.generate("import os\n", **ask)
            store = store_of(up)
            os.kill(store, signal.SIGKILL)
            assert up.stderr is not None
            while "the store has ended, and every session with it; starting another" not in up.stderr.readline():
                pass
            wait_until_gone([store])
            assert client.generate("import os\n", **ask).token_ids == before.token_ids
            with pytest.raises(NotFound):
                client.get_session(before.session_id)
            store = store_of(up)
    finally:
        up.send_signal(signal.SIGTERM)
        up.communicate()
    wait_until_gone([store])
    assert up.returncode == 0
