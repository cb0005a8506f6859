"""Nothing reads what a service writes: it serves on, ends in time, and says how many lines it has lost."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from bench.systems.simulated import write_tokenizer
from specdec.client import Client
from specdec.settings.standard_streams import MAX_WAITING_BYTES
from tests.support.stack import START_TIMEOUT_S, STOP_TIMEOUT_S, Stack, is_serving
from tests.support.up_rig import ENVIRON, SPECDEC, specdec

SIMULATED = "simulated:8b-0.6b"
NUM_REQUESTS = 40
#: Writes numbered lines of 100 characters, some of them in one print, and ends as the first argument says.
WRITER = """
import sys, time
from specdec.settings.standard_streams import never_wait_for_readers
never_wait_for_readers()
for number in range(int(sys.argv[1])):
    print(f"{number:08}".ljust(99, "."), file=sys.stderr)
print("written", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def fill(descriptor: int) -> None:
    """Write to a pipe until it takes no more, without an effect on others that write to it."""
    opened = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        for size in (1 << 16, 1):
            while True:
                try:
                    os.write(opened, b"\n" * size)
                except BlockingIOError:
                    break
    finally:
        os.close(opened)


@contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """Ends of a pipe that takes no more bytes, the one to read first."""
    reader, writer = os.pipe()
    try:
        fill(writer)
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def ask(endpoint: str) -> None:
    with Client(endpoint) as client:
        for number in range(NUM_REQUESTS):
            answer = client.generate(prompt_token_ids=[number + 1, 2, 3], max_new_tokens=2, ignore_eos=True)
            assert len(answer.token_ids) == 2


def ask_over_http(address: str) -> None:
    for number in range(NUM_REQUESTS):
        body = json.dumps({"model": SIMULATED, "prompt": [number + 1, 2, 3], "max_tokens": 2}).encode()
        ask = Request(f"http://{address}/v1/completions", body, {"Content-Type": "application/json"})
        with urlopen(ask, timeout=START_TIMEOUT_S) as answer:
            assert json.load(answer)["choices"]


def test_services_whose_output_is_full_answer_requests_and_health_and_end_on_sigterm(tokenizer_dir: Path) -> None:
    debug = ("--log-level", "debug")
    stack = Stack(SIMULATED, SIMULATED, tokenizer=tokenizer_dir, replica_arguments=debug, coordinator_arguments=debug,
                  gateway_arguments=debug)  # fmt: skip
    with ExitStack() as ending:
        for part in stack.parts.values():
            os.mkfifo(part.log_path)
            pipe = os.open(part.log_path, os.O_RDWR)
            ending.callback(os.close, pipe)
            fill(pipe)
        with stack:
            ask(stack.endpoint)
            ask_over_http(stack.parts["gateway"].address)
            for name in ("target", "draft", "coordinator"):
                assert is_serving(stack.parts[name].address, timeout_s=START_TIMEOUT_S)
            assert [stack.terminate(name) for name in ("gateway", "coordinator", "draft", "target")] == [0] * 4


def test_up_whose_output_is_full_answers_requests_and_ends_on_sigterm(tokenizer_dir: Path) -> None:
    flags = ["--target", SIMULATED, "--draft", SIMULATED, "--tokenizer", str(tokenizer_dir), "--listen", "127.0.0.1:0"]
    for service in ("draft", "target", "coordinator"):
        flags += ["--set", f"{service}.log_level=debug"]
    with full_pipe() as (_, writer):
        command = [*SPECDEC, "up", *flags, "--log-level", "debug"]
        up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, text=True, env=ENVIRON)
        try:
            assert up.stdout is not None
            endpoint = up.stdout.readline().strip().removeprefix("ready grpc=")
            ask(endpoint)
            up.send_signal(signal.SIGTERM)
            assert up.wait(2 * STOP_TIMEOUT_S) == 0
        finally:
            up.kill()
            up.communicate()
    assert specdec("health", endpoint).returncode == 1


@contextmanager
def written(num_lines: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has written lines to a pipe that is not read yet; it ends after a line on its stdin."""
    command = [sys.executable, "-c", WRITER, str(num_lines)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"written\n"
            yield process
        finally:
            process.kill()


def numbers_of(content: bytes) -> list[int]:
    return [int(line[:8]) for line in content.decode().splitlines() if line[:8].isdigit()]


def test_lines_that_wait_are_read_whole_and_in_order_also_after_the_end_of_the_process() -> None:
    num_lines = MAX_WAITING_BYTES // 100
    with written(num_lines) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.close()
        content = process.stderr.read()
        assert process.wait() == 0
    assert numbers_of(content) == list(range(num_lines))
    assert content == b"".join((b"%08d" % number).ljust(99, b".") + b"\n" for number in range(num_lines))


def test_lines_that_exceed_the_buffer_are_counted_in_the_next_line_that_is_read() -> None:
    num_lines = 3 * MAX_WAITING_BYTES // 100
    with written(num_lines) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(MAX_WAITING_BYTES // 100)]
        while not (last := process.stderr.readline()).endswith(b"did not read\n"):
            lines.append(last)
        process.stdin.close()
        assert process.stderr.read() == b""
    read = numbers_of(b"".join(lines))
    assert read == list(range(len(read)))
    assert last == b"%d lines of output were lost because their reader did not read\n" % (num_lines - len(read))


def test_a_process_ends_although_its_lines_are_never_read() -> None:
    with written(3 * MAX_WAITING_BYTES // 100) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(STOP_TIMEOUT_S) == 0


def test_other_processes_that_write_to_the_same_pipe_go_on_waiting_for_its_reader() -> None:
    reader, writer = os.pipe()
    with subprocess.Popen([sys.executable, "-c", WRITER, "1"], stdin=subprocess.PIPE, stderr=writer) as process:
        process.communicate(b"\n")
    assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK
    assert numbers_of(os.read(reader, 1000)) == [0]
    os.close(reader)
    os.close(writer)
