"""Processes that a template forks end, answer signals and read their settings as those of `python -m` do."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from specdec.supervision import process_template
from specdec.supervision.forked_process import ForkedProcess
from specdec.supervision.process_template import Command, ProcessTemplate, Streams, TemplateFailed, shared_template
from tests.support.stack import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates need Linux")

#: NumPy starts a thread for each further core when it is imported, and `specdec up` tells it not to.
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")} | {
    "OPENBLAS_NUM_THREADS": "1"
}


@pytest.fixture(scope="module")
def template() -> Iterator[ProcessTemplate]:
    template = ProcessTemplate(["gateway.__main__"], ENVIRON, options=())
    yield template
    template.close()


def gateway(template: ProcessTemplate, log: Path, *arguments: str, **environ: str) -> ForkedProcess:
    flags = ["--redis-url", "memory://", "--coordinator", "127.0.0.1:1", *arguments]
    with open(os.devnull, "rb") as nothing, log.open("wb") as file:
        return template.start(Command("gateway", flags, ENVIRON | environ), Streams(nothing, file, file))


def serving_gateway(template: ProcessTemplate, log: Path) -> ForkedProcess:
    process = gateway(template, log, "--listen", f"127.0.0.1:{free_port()}")
    while "listening" not in log.read_text():
        try:
            pytest.fail(f"exit code {process.wait(0.05)}: {log.read_text()}")
        except subprocess.TimeoutExpired:
            continue
    return process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_forked_service_is_a_process_that_ends_by_a_signal(
    template: ProcessTemplate, tmp_path: Path, number: int, code: int
) -> None:
    process = serving_gateway(template, tmp_path / "log")
    assert process.poll() is None
    assert int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
    words = Path(f"/proc/{process.pid}/cmdline").read_text().rstrip("\0").split("\0")
    assert words[1:5] == ["-m", "gateway", "--redis-url", "memory://"]
    process.send_signal(number)
    assert (process.wait(), process.poll()) == (code, code)
    process.kill()  # as with `Popen`, without an effect


def test_flags_and_settings_of_the_environment_are_those_of_the_call(template: ProcessTemplate, tmp_path: Path) -> None:
    refused = [
        gateway(template, tmp_path / "flag", "--max-body-bytes", "no number"),
        gateway(template, tmp_path / "environment", SPECDEC_GATEWAY__MAX_BODY_BYTES="no number"),
    ]
    assert [process.wait() for process in refused] == [2, 2]
    for name in ("flag", "environment"):
        (line,) = (tmp_path / name).read_text().splitlines()
        assert line.startswith("error: ")
        assert "Input should be a valid integer" in line


def test_a_process_outlives_its_template_and_its_exit_code_is_known(tmp_path: Path) -> None:
    template = ProcessTemplate(["gateway.__main__"], ENVIRON, options=())
    process = serving_gateway(template, tmp_path / "log")
    template.close()
    assert process.poll() is None
    process.terminate()
    assert process.wait() == 0
    with pytest.raises(TemplateFailed):
        gateway(template, tmp_path / "log")


def test_a_template_that_hangs_is_given_up_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_template, "_ANSWER_S", 0.5)
    before = {child.pid for child in psutil.Process().children()}
    hung = ProcessTemplate(["gateway.__main__"], ENVIRON, options=())
    (template,) = [child for child in psutil.Process().children() if child.pid not in before]
    while not hung.is_ready:
        time.sleep(0.05)
    template.suspend()
    for _ in range(2):  # a late answer to the first request is not taken for one to the second
        with pytest.raises(TemplateFailed):
            gateway(hung, tmp_path / "log")
        with contextlib.suppress(psutil.NoSuchProcess):
            template.resume()
    hung.close()
    assert (tmp_path / "log").read_text() == ""


def test_templates_in_several_threads_do_not_take_each_other_s_children_away() -> None:
    """The kernel keeps one answer for the whole process to who adopts orphans."""
    templates = [ProcessTemplate(["json"], ENVIRON, options=()) for _ in range(2)]

    def ends(template: ProcessTemplate) -> list[int]:
        return [start_nothing(template).wait(60.0) for _ in range(40)]

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(ends, templates)) == [[0] * 40, [0] * 40]
    for template in templates:
        template.close()


def start_nothing(template: ProcessTemplate, **environ: str) -> ForkedProcess:
    with open(os.devnull, "r+b") as nothing:
        return template.start(Command("this", [], ENVIRON | environ), Streams(nothing, nothing, nothing))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_shared_template_is_made_once_and_again_after_its_end() -> None:
    before = num_descriptors()
    first = shared_template(("json",), ENVIRON)
    assert first is not None
    assert shared_template(("json",), ENVIRON | {"SPECDEC_LOG_LEVEL": "debug"}) is first
    assert shared_template(("json",), ENVIRON | {"OMP_NUM_THREADS": "64"}) is None
    assert start_nothing(first).wait(60.0) == 0
    first.close()
    again = shared_template(("json",), ENVIRON)
    assert again is not None
    assert again is not first
    again.close()
    assert num_descriptors() == before


def test_a_shared_template_that_never_started_anything_is_not_made_again() -> None:
    template = shared_template(("no_such_module",), ENVIRON)
    assert template is not None
    with pytest.raises(TemplateFailed):
        start_nothing(template)
    assert [shared_template(("no_such_module",), ENVIRON) for _ in range(2)] == [None, None]


def test_a_request_that_is_too_long_is_refused_and_the_next_one_is_served() -> None:
    template = ProcessTemplate(["json"], ENVIRON, options=())
    with pytest.raises(TemplateFailed, match="bytes"):
        start_nothing(template, SPECDEC_LONG="x" * 200_000)
    assert start_nothing(template).wait(60.0) == 0
    template.close()


def test_a_process_without_a_descriptor_of_its_own_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ProcessTemplate(["json"], ENVIRON, options=())
    assert start_nothing(template).wait(60.0) == 0

    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "no descriptors of processes")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(TemplateFailed):
        start_nothing(template)
    template.close()
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]


def test_a_process_ends_where_the_kernel_forgets_exit_codes() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        template = ProcessTemplate(["json"], ENVIRON, options=())
        assert [start_nothing(template).wait(60.0) for _ in range(3)] == [0, 0, 0]
        template.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_template_may_have_a_descriptor_beyond_those_that_select_takes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_100)]
    try:
        template = ProcessTemplate(["json"], ENVIRON, options=())
        while not template.is_ready:
            time.sleep(0.05)
        assert start_nothing(template).wait(60.0) == 0
        template.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_environment_that_imports_may_read_does_not_fit(template: ProcessTemplate) -> None:
    assert template.fits(ENVIRON | {"SPECDEC_TARGET__MODEL": "models/demo-target"})
    assert not template.fits(ENVIRON | {"OMP_NUM_THREADS": "64"})
