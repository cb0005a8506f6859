"""`specdec up` as a user runs it: real processes, the demo pair, nothing replaced."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.systems.models import DEMO
from specdec.checkpoints.vocabulary import load_vocabulary, vocabulary_fingerprint
from specdec.cli import up
from specdec.cli.__main__ import build_parser
from specdec.client import Client
from specdec.contract.errors import VocabularyMismatch
from tests.support.tiny_models import build_tiny_model
from tests.support.up_rig import (
    ENVIRON,
    SPECDEC,
    child_running,
    children_of,
    complaints,
    specdec,
    start_up,
    wait_until_gone,
)

ROOT = Path(__file__).resolve().parents[2]
NUM_BLOCKS = 8
BLOCK_BYTES = 16 * 6 * 4 * (32 + 32) * 4  # tokens, layers, KV heads, keys and values, float32: of the demo's target


@pytest.fixture(scope="module")
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves a socket's path room."""
    with tempfile.TemporaryDirectory(prefix="sd-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def system(short_folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A system with two drafts, shares of memory and a folder for its sockets.

    When it is stopped, nothing of it may be left and nothing have been complained of.
    """
    memory = ["--kv-cache-bytes-target", str(NUM_BLOCKS * BLOCK_BYTES), "--gpu-memory-utilization-draft", "0.25"]
    draft = ["--draft", str(DEMO / "draft"), "--replicas-draft", "2"]
    up, endpoint = start_up(*draft, *memory, "--dtype", "float32", TMPDIR=str(short_folder))
    children = children_of(up)
    assert len(children) == 4
    yield up, endpoint
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) == 0
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert list(short_folder.iterdir()) == []
    stdout, stderr = up.communicate()
    assert (stdout, complaints(stderr)) == ("", "")


@pytest.fixture(scope="module")
def endpoint(system: tuple[subprocess.Popen[str], str]) -> str:
    return system[1]


def test_health_of_a_running_system_is_serving(endpoint: str) -> None:
    result = specdec("health", endpoint)
    assert (result.returncode, result.stdout) == (0, "SERVING\n")
    assert json.loads(specdec("health", endpoint, "--json").stdout) == {"status": "SERVING"}


def taken_port() -> tuple[list[str], socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    return ["--listen", f"127.0.0.1:{listener.getsockname()[1]}"], listener


def bad_model() -> tuple[list[str], contextlib.AbstractContextManager[object]]:
    return [
        "--listen",
        "127.0.0.1:0",
        "--target",
        "/no/such/model",
        "--draft",
        "/no/such/model",
    ], contextlib.nullcontext()


def no_redis() -> tuple[list[str], contextlib.AbstractContextManager[object]]:
    at_once = [word for role in ("target", "draft", "coordinator") for word in ("--set", f"{role}.store_wait_s=0")]
    return ["--listen", "127.0.0.1:0", "--redis-url", "redis://127.0.0.1:1/0", *at_once], contextlib.nullcontext()


@pytest.mark.parametrize("fault", [taken_port, bad_model, no_redis])
def test_up_that_cannot_start_says_why_in_one_line_and_leaves_nothing(
    fault: Callable[[], tuple[list[str], contextlib.AbstractContextManager[object]]],
) -> None:
    flags, held = fault()
    with held:
        result = specdec("up", *flags)
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(r"error: .+ \([A-Z_]+\)\n", complaints(result.stderr)), result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def misfits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft of different tokenizers."""
    sizes = {"target": 256, "draft": 200}
    target, draft = (
        build_tiny_model("llama", tmp_path_factory.mktemp(name), vocabulary_size=size, num_layers=1)
        for name, size in sizes.items()
    )
    return target, draft


def own_children() -> list[str]:
    """Processes that this thread started and that are still there."""
    return Path("/proc/thread-self/children").read_text().split()


def fingerprints(models: tuple[Path, Path]) -> list[str]:
    return [vocabulary_fingerprint(load_vocabulary(model)) for model in models]


def test_up_with_two_tokenizers_says_so_before_anything_is_loaded(misfits: tuple[Path, Path]) -> None:
    target, draft = map(str, misfits)
    result = specdec("up", "--listen", "127.0.0.1:0", "--target", target, "--draft", draft)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = complaints(result.stderr).splitlines()
    assert line.endswith("(VOCABULARY_MISMATCH)")
    assert "--draft" in line
    assert all(fingerprint in line for fingerprint in fingerprints(misfits))


def test_up_ends_when_its_coordinator_refuses_a_replica(
    misfits: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A draft that got another tokenizer after the look at the files: the look is left out here.
    before = own_children()
    monkeypatch.setattr(up, "require_servable_pair", lambda models, elsewhere: None)
    args = ["up", "--listen", "127.0.0.1:0", "--target", str(misfits[0]), "--draft", str(misfits[1])]
    with pytest.raises(VocabularyMismatch) as caught:
        up.run(build_parser(ENVIRON).parse_args(args), args, ENVIRON, threading.Event())
    assert str(caught.value).startswith("refused: draft replica ")
    assert all(fingerprint in str(caught.value) for fingerprint in fingerprints(misfits))
    assert own_children() == before
    assert "[coordinator] refused: draft replica " in capsys.readouterr().err


def test_top_finds_the_metrics_of_every_service_of_up_without_a_flag(
    system: tuple[subprocess.Popen[str], str], short_folder: Path
) -> None:
    shown = json.loads(specdec("top", "--json", "--endpoint", system[1], TMPDIR=str(short_folder)).stdout)
    assert shown["metrics"] == {"num_services": len(children_of(system[0])), "unreachable": []}
    assert (shown["requests"]["running"], shown["tokens_per_s"]) == (0, 0.0)


def test_memory_is_given_to_each_role_of_up(system: tuple[subprocess.Popen[str], str]) -> None:
    started, endpoint = system
    with Client(endpoint) as client:
        assert client.info().max_context_tokens == NUM_BLOCKS * 16
    shares = []
    for pid in children_of(started):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        shares += [share for flag, share in itertools.pairwise(words) if flag == "--gpu-memory-utilization"]
    assert shares == ["0.125", "0.125"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--gpu-memory-utilization-target", "0.8"],
            "target 0.8 and --gpu-memory-utilization-draft 0.3 are more than 1",
        ),
        (["--gpu-memory-utilization-draft", "0"], "--gpu-memory-utilization-draft must be greater than 0"),
        (["--gpu-memory-utilization-target", "nan"], "--gpu-memory-utilization-target must be "),
        (["--kv-cache-bytes-draft", "0"], "--kv-cache-bytes-draft must be greater than or equal to 1"),
    ],
)
def test_shares_of_memory_that_make_no_sense_are_refused_by_flag(flags: list[str], words: str) -> None:
    result = specdec("up", *flags)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.endswith("(INVALID_REQUEST)\n")
    assert words in result.stderr


def test_up_that_takes_long_says_what_it_waits_for() -> None:
    up = subprocess.Popen([*SPECDEC, "up", "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True, env=ENVIRON)
    os.kill(coordinator := child_running(up, "coordinator"), signal.SIGSTOP)
    try:
        assert up.stderr is not None
        for words in ("replicas: importing .+", "waiting for (.+, )?coordinator"):
            while not re.fullmatch(rf"starting \(\d+ s\): {words}\n", line := up.stderr.readline()):
                assert line
    finally:
        os.kill(coordinator, signal.SIGCONT)
        up.send_signal(signal.SIGTERM)
        up.communicate()
    assert up.returncode == 0


@pytest.fixture(scope="module")
def beside_our_name(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A system that was started in a folder with a package of our name, and the line that it printed."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "specdec").mkdir()
    (folder / "specdec" / "__init__.py").touch()
    script = f"import sys; sys.path[0] = {str(ROOT)!r}; from specdec.cli.__main__ import main; main()"
    command = [sys.executable, "-c", script, "up", "--listen", "127.0.0.1:0"]
    environ = {name: value for name, value in ENVIRON.items() if name != "PYTHONPATH"}
    started = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    assert started.stdout is not None
    yield started, started.stdout.readline()
    started.kill()
    started.communicate()


@pytest.mark.full
def test_up_starts_in_a_folder_that_has_one_of_our_name(beside_our_name: tuple[subprocess.Popen[str], str]) -> None:
    started, line = beside_our_name
    if not line:
        pytest.fail(started.communicate()[1])
    assert line.startswith("ready grpc=")


def test_the_children_of_a_killed_up_end_by_themselves(beside_our_name: tuple[subprocess.Popen[str], str]) -> None:
    up, _ = beside_our_name
    children = children_of(up)
    assert len(children) == 3
    up.kill()
    up.wait()
    wait_until_gone(children)


def test_up_on_the_address_of_another_system_is_never_ready(endpoint: str, short_folder: Path) -> None:
    result = specdec("up", "--listen", endpoint, TMPDIR=str(short_folder))  # where it looks for systems of this user
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: your specdec up at {endpoint} is still running; stop it with `specdec down --endpoint {endpoint}`, or "
        "choose another address with --listen (ADDRESS_IN_USE)\n"
    )


def test_only_the_user_reaches_the_sockets_of_up(system: tuple[subprocess.Popen[str], str], short_folder: Path) -> None:
    """The end of the system finds them removed."""
    up, endpoint = system
    sockets = list(short_folder.glob("*/*.sock"))  # the store's, and the one that `specdec scale` dials
    assert [path.parent.stat().st_mode & 0o777 for path in sockets] == [0o700] * 2
    # `up` itself listens on no port, because any user of the machine could dial it.
    assert listening_ports(up.pid) == set()
    services = {port for pid in children_of(up) for port in listening_ports(pid)}
    assert len(services) == 9  # one to serve and one for metrics each, and the coordinator's for operators
    assert int(endpoint.rpartition(":")[2]) in services


def listening_ports(pid: int) -> set[int]:
    """TCP ports that a process listens on."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(descriptor))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}
