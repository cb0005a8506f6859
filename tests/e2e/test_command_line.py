"""`specdec up`, `generate` and `chat` as a user runs them: real processes, the demo pair, nothing replaced."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
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

from specdec.cli import up
from specdec.cli.__main__ import build_parser
from specdec.client import Client
from specdec.vocabulary import load_vocabulary, vocabulary_fingerprint
from tests.support.tiny_models import build_tiny_model
from tests.support.up_rig import ENVIRON, SPECDEC, children_of, complaints, specdec, start_up, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]
ANSI = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A system with two drafts; when it is stopped, nothing of it may be left and nothing have been complained of."""
    up, endpoint = start_up("--replicas-draft", "2")
    children = children_of(up)
    assert len(children) == 4
    yield endpoint
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) == 0
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    stdout, stderr = up.communicate()
    assert (stdout, complaints(stderr)) == ("", "")


def test_generate_json_is_one_object_and_mode_changes_no_greedy_token(endpoint: str) -> None:
    outputs = {}
    for mode in ("off", "rejection", "block", "coupled"):
        flags = (
            "--json",
            "--temperature",
            "0",
            "--max-new-tokens",
            "24",
            "--mode",
            mode,
            "--gamma",
            "3",
            "--endpoint",
            endpoint,
        )
        result = specdec("generate", "import os\n", *flags)
        assert result.returncode == 0, result.stderr
        shown = json.loads(result.stdout)
        outputs[mode] = shown["token_ids"]
        assert shown["usage"]["num_output_tokens"] == len(shown["token_ids"]) == 24
        assert (shown["stats"]["num_draft_tokens"] > 0) is (mode != "off")
    assert len(set(map(tuple, outputs.values()))) == 1


def test_generate_without_a_terminal_is_plain_text_and_a_closing_line(endpoint: str) -> None:
    result = specdec(
        "generate", "def f(", "--seed", "7", "--gamma", "3", "--max-new-tokens", "16", SPECDEC_ENDPOINT=endpoint
    )
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    assert re.fullmatch(r"rounds \d+  alpha (\d\.\d\d|n/a)  tau \d+\.\d\d  \d+\.\d tokens/s\n", result.stderr)


def test_generate_in_a_terminal_colours_tokens_by_source_and_shows_a_legend(endpoint: str) -> None:
    args = ("generate", "import os\n", "--temperature", "0", "--max-new-tokens", "24", "--gamma", "3")
    output = in_terminal(*args, endpoint=endpoint)
    text, legend, _ = output.replace("\r\n", "\n").rsplit("\n", 3)[0:3]
    plain = ANSI.sub("", output).replace("\r\n", "\n")
    assert set(ANSI.findall(text)) & set(ANSI.findall(legend))
    assert ANSI.sub("", legend) == "accepted  corrected  bonus  target-only"
    assert re.search(r"alpha (0\.\d\d|1\.00)", plain)
    assert plain.startswith(specdec(*args, "--endpoint", endpoint).stdout)


def test_no_color_turns_colour_off_in_a_terminal(endpoint: str) -> None:
    output = in_terminal("generate", "import os\n", "--max-new-tokens", "8", endpoint=endpoint, NO_COLOR="1")
    assert "\x1b" not in output
    assert "alpha" in output


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *args: str, endpoint: str, **environ: str) -> None:
        self._descriptor, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*SPECDEC, *args, "--endpoint", endpoint], stdin=theirs, stdout=theirs, stderr=theirs,
            env=ENVIRON | {"TERM": "xterm"} | environ,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""
        self._position = 0

    def read_until(self, text: str) -> None:
        """Reads on until `text` follows what was read up to before."""
        while (found := self.shown.find(text, self._position)) < 0:
            self.shown += os.read(self._descriptor, 4096).decode(errors="replace")
        self._position = found + len(text)

    def write(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def end(self) -> str:
        """Everything that was shown, once the command has ended well."""
        with contextlib.suppress(OSError):  # the end of a terminal is an error to read
            self.read_until("\0")
        os.close(self._descriptor)
        assert self.process.wait() == 0, self.shown
        return self.shown


def in_terminal(*args: str, endpoint: str, **environ: str) -> str:
    """What a command shows on a terminal."""
    return Terminal(*args, endpoint=endpoint, **environ).end()


def test_chat_in_a_terminal_stops_an_answer_on_ctrl_c_and_leaves_on_ctrl_d(endpoint: str) -> None:
    # Greedily the demo model answers this with 1,500 tokens of code: it cannot have ended by itself when it is stopped.
    terminal = Terminal("chat", "--temperature", "0", "--max-new-tokens", "1500", endpoint=endpoint)
    terminal.read_until("> ")
    for _ in range(2):
        terminal.write("import os\n")
        terminal.read_until("\x1b[3")  # the first coloured token
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until("stopped")
        terminal.read_until("> ")
    terminal.write("\x04")
    shown = terminal.end()
    assert "error" not in shown
    assert "Traceback" not in shown


def test_chat_answers_each_line_over_one_session(endpoint: str) -> None:
    flags = ("--temperature", "0", "--max-new-tokens", "8", "--endpoint", endpoint)
    result = specdec("chat", *flags, stdin="hello\nand again\n")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("rounds ") == 2


@pytest.mark.parametrize(
    ("args", "code_and_reason"),
    [
        (["generate", ""], "INVALID_ARGUMENT INVALID_REQUEST"),
        (["generate", "x", "--temperature", "nan"], "INVALID_ARGUMENT INVALID_REQUEST"),
        (["generate", "x", "--top-p", "0"], "INVALID_ARGUMENT INVALID_REQUEST"),
        (["generate", "x", "--gamma", "4000"], "INVALID_ARGUMENT INVALID_REQUEST"),
        (["generate", "x " * 9000], "INVALID_ARGUMENT CONTEXT_TOO_LONG"),
    ],
    ids=["empty prompt", "nan temperature", "top-p 0", "gamma", "long prompt"],
)
def test_a_refused_request_is_one_error_line(endpoint: str, args: list[str], code_and_reason: str) -> None:
    result = specdec(*args, "--endpoint", endpoint)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {code_and_reason}: ")
    assert result.stderr.count("\n") == 1


def test_health_of_a_running_system_is_serving(endpoint: str) -> None:
    result = specdec("health", endpoint)
    assert (result.returncode, result.stdout) == (0, "SERVING\n")


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
    return ["--listen", "127.0.0.1:0", "--redis-url", "redis://127.0.0.1:1/0"], contextlib.nullcontext()


@pytest.mark.parametrize("fault", [taken_port, bad_model, no_redis])
def test_up_that_cannot_start_says_why_in_one_line_and_leaves_nothing(
    fault: Callable[[], tuple[list[str], contextlib.AbstractContextManager[object]]],
) -> None:
    flags, held = fault()
    with held:
        result = specdec("up", *flags)
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(r"error: [A-Z_]+ [A-Z_]+: .+\n", complaints(result.stderr)), result.stderr
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
    assert line.startswith("error: FAILED_PRECONDITION VOCABULARY_MISMATCH: ")
    assert "--draft" in line
    assert all(fingerprint in line for fingerprint in fingerprints(misfits))


def test_up_ends_when_its_coordinator_refuses_a_replica(
    misfits: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A draft that got another tokenizer after the look at the files: the look is left out here.
    before = own_children()
    monkeypatch.setattr(up, "require_servable_pair", lambda models: None)
    args = ["up", "--listen", "127.0.0.1:0", "--target", str(misfits[0]), "--draft", str(misfits[1])]
    with pytest.raises(up.ChildFailed) as caught:
        up.run(build_parser(ENVIRON).parse_args(args), ENVIRON, threading.Event())
    assert str(caught.value).startswith("FAILED_PRECONDITION VOCABULARY_MISMATCH: refused: draft replica ")
    assert all(fingerprint in str(caught.value) for fingerprint in fingerprints(misfits))
    assert own_children() == before
    assert "[coordinator] refused: draft replica " in capsys.readouterr().err


def test_memory_is_given_to_each_role_of_up() -> None:
    num_blocks = 8
    block_bytes = 16 * 6 * 4 * (32 + 32) * 4  # tokens, layers, KV heads, keys and values, float32: of the demo's target
    flags = ["--kv-cache-bytes-target", str(num_blocks * block_bytes), "--gpu-memory-utilization-draft", "0.25"]
    started, endpoint = start_up("--replicas-draft", "2", *flags, "--dtype", "float32")
    with Client(endpoint) as client:
        assert client.info().max_context_tokens == num_blocks * 16
    shares = []
    for pid in children_of(started):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        shares += [word for word in variables if "GPU_MEMORY_UTILIZATION" in word]
        shares += [share for flag, share in itertools.pairwise(words) if flag == "--gpu-memory-utilization"]
    assert [share for share in shares if "TARGET" in share] == ["SPECDEC_TARGET__GPU_MEMORY_UTILIZATION=0.6"]
    assert shares.count("0.125") == 2
    started.send_signal(signal.SIGTERM)
    started.communicate()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--gpu-memory-utilization-target", "0.8"],
            "target 0.8 and --gpu-memory-utilization-draft 0.3 are more than 1",
        ),
        (["--gpu-memory-utilization-draft", "0"], "--gpu-memory-utilization-draft must be above 0 and at most 1"),
        (["--gpu-memory-utilization-target", "nan"], "--gpu-memory-utilization-target must be above 0 and at most 1"),
        (["--kv-cache-bytes-draft", "0"], "--kv-cache-bytes-draft must be at least 1"),
    ],
)
def test_shares_of_memory_that_make_no_sense_are_refused_by_flag(flags: list[str], words: str) -> None:
    result = specdec("up", *flags)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: INVALID_ARGUMENT INVALID_REQUEST: ")
    assert words in result.stderr


def test_up_that_takes_long_says_what_it_waits_for() -> None:
    up = subprocess.Popen([*SPECDEC, "up", "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True, env=ENVIRON)
    while len(children := children_of(up)) < 3:
        assert up.poll() is None
    os.kill(children[0], signal.SIGSTOP)
    try:
        assert up.stderr is not None
        line = up.stderr.readline()
        assert re.fullmatch(r"starting \(\d+ s\): target-0: \S.*, draft-0: \S.*, coordinator: \S.*\n", line)
    finally:
        os.kill(children[0], signal.SIGCONT)
        up.send_signal(signal.SIGTERM)
        up.communicate()
    assert up.returncode == 0


def test_up_starts_in_a_folder_that_has_one_of_our_name(tmp_path: Path) -> None:
    (tmp_path / "specdec").mkdir()
    (tmp_path / "specdec" / "__init__.py").touch()
    script = f"import sys; sys.path[0] = {str(ROOT)!r}; from specdec.cli.__main__ import main; main()"
    command = [sys.executable, "-c", script, "up", "--listen", "127.0.0.1:0"]
    environ = {name: value for name, value in ENVIRON.items() if name != "PYTHONPATH"}
    started = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    assert started.stdout is not None
    line = started.stdout.readline()
    started.send_signal(signal.SIGTERM)
    _, stderr = started.communicate()
    assert line.startswith("ready grpc="), stderr


def test_up_on_the_address_of_another_system_is_never_ready(endpoint: str) -> None:
    result = specdec("up", "--listen", endpoint)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"error: UNAVAILABLE [A-Z_]+: cannot listen on .+\n", result.stderr), result.stderr


def test_the_children_of_a_killed_up_end_by_themselves() -> None:
    up, _ = start_up()
    children = children_of(up)
    assert len(children) == 3
    up.kill()
    up.wait()
    wait_until_gone(children)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves a socket's path room."""
    with tempfile.TemporaryDirectory(prefix="sd-", dir="/tmp") as folder:
        yield Path(folder)


def test_the_store_of_up_is_reached_by_nobody_else_and_leaves_nothing(short_folder: Path) -> None:
    up, endpoint = start_up(TMPDIR=str(short_folder))
    (socket_path,) = short_folder.glob("*/*.sock")
    assert socket_path.parent.stat().st_mode & 0o777 == 0o700
    # It listens on no port: whoever is on the machine may dial those.
    assert listening_ports(up.pid) == set()
    services = {port for pid in children_of(up) for port in listening_ports(pid)}
    assert len(services) == 3
    assert int(endpoint.rpartition(":")[2]) in services
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) == 0
    assert list(short_folder.iterdir()) == []


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
