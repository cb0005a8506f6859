"""What a process keeps for as long as it lives: not walked by the collector, and in large pages where there are any."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from specdec.service import memory

#: 60 MB of objects that stay, and 40 threads whose stacks are hardly used. Whether the system has large pages to give
#: is found out by a mapping beside them.
PROGRAM = """
import ctypes, mmap, sys, threading
from specdec.service import memory

libc = ctypes.CDLL(None)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
own = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
own.write(b"1" * len(own))
begin = -(-ctypes.addressof(ctypes.c_char.from_buffer(own)) // (2 << 20)) * (2 << 20)
if libc.madvise(begin, 2 << 20, 25) != 0:
    sys.exit(7)

memory._MOST_BYTES = int(sys.argv[1]) << 20
kept = [[number, str(number)] for number in range(500_000)]
done = threading.Event()
threads = [threading.Thread(target=done.wait) for _ in range(40)]
for thread in threads:
    thread.start()

def told(name):
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10

before, used = told("AnonHugePages:"), told("Rss:")
memory.gather_pages()
print((told("AnonHugePages:") - before) >> 20, told("Rss:") / used)
assert kept[-1] == [499_999, "499999"]
done.set()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="this system does not tell of large pages")
@pytest.mark.parametrize(("most_mb", "expected_mb"), [(512, range(30, 250)), (1, range(2))])
def test_what_a_process_uses_moves_to_large_pages_and_takes_no_more_memory(most_mb: int, expected_mb: range) -> None:
    command = [sys.executable, "-c", PROGRAM, str(most_mb)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if ended.returncode == 7 or "[never]" in (memory._LARGE_PAGES / "enabled").read_text():
        pytest.skip("this system gives no large pages when asked (before Linux 6.1, or told never to)")
    assert not ended.stderr
    moved_mb, growth = ended.stdout.split()
    assert int(moved_mb) in expected_mb
    assert float(growth) < 1.1


@pytest.mark.parametrize(
    ("enabled", "size"), [("always madvise [never]", "2097152"), ("always [madvise] never", "536870912"), ("", "")]
)
def test_nothing_is_asked_of_a_system_that_is_told_never_to_or_has_others_or_none(
    enabled: str, size: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if enabled:
        (tmp_path / "enabled").write_text(enabled)
        (tmp_path / "hpage_pmd_size").write_text(size)
    monkeypatch.setattr(memory, "_LARGE_PAGES", tmp_path)
    monkeypatch.setattr(memory, "_MAPPINGS", tmp_path / "not to be read")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: pytest.fail("something is asked"))
    memory.gather_pages()


def test_a_service_that_stays_has_its_memory_gathered_and_ends_without_waiting_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered = threading.Event()
    monkeypatch.setattr(memory, "_GATHER_AFTER_S", 0.2)
    monkeypatch.setattr(memory, "gather_pages", gathered.set)
    thresholds = gc.get_threshold()
    try:
        memory.settle()
    finally:
        gc.set_threshold(*thresholds)
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert timers
    assert all(timer.daemon for timer in timers)
    assert gathered.wait(10.0)


def test_the_collector_is_off_during_imports_only() -> None:
    def fail() -> None:
        with memory.collector_at_rest():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()
