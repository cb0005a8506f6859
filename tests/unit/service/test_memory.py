"""What a process keeps for as long as it lives: not walked by the collector, and in large pages where there are any."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from specdec.service import memory

#: 60 MB of objects that stay, and 40 threads whose stacks are hardly used.
PROGRAM = """
import threading
from specdec.service import memory

kept = [[number, str(number)] for number in range(500_000)]
done = threading.Event()
threads = [threading.Thread(target=done.wait) for _ in range(40)]
for thread in threads:
    thread.start()

def told(name):
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10

before, used = told("AnonHugePages:"), told("Rss:")
gathered = memory.gather_pages()
print(gathered, told("AnonHugePages:") - before, told("Rss:") / used)
assert kept[-1] == [499_999, "499999"]
done.set()
"""


def test_what_a_process_uses_moves_to_large_pages_and_takes_no_more_memory() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    gathered, moved, growth = (float(word) for word in ended.stdout.split())
    if not gathered:
        pytest.skip("this system gives no large pages when asked (before Linux 6.1, or told never to)")
    assert gathered == moved > 30 << 20
    assert growth < 1.1


@pytest.mark.parametrize("name", ["_SETTING", "_MAPPINGS"])
def test_where_the_system_is_told_never_to_or_has_none_nothing_is_asked_of_it(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(memory, name, setting if name == "_SETTING" else tmp_path / "missing")
    assert memory.gather_pages() == 0


def test_a_service_that_stays_has_its_memory_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = threading.Event()
    monkeypatch.setattr(memory, "_GATHER_AFTER_S", 0.0)
    monkeypatch.setattr(memory, "gather_pages", lambda: gathered.set() or 0)
    thresholds = gc.get_threshold()
    try:
        memory.settle()
    finally:
        gc.set_threshold(*thresholds)
    assert gathered.wait(10.0)


def test_the_collector_rests_while_much_is_imported_and_not_longer() -> None:
    def fail() -> None:
        with memory.collector_at_rest():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()
