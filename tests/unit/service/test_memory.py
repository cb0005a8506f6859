"""What a service does about Python's cyclic garbage collector, and about freed memory."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys

import pytest

from specdec.service import memory

#: Frees pieces as a load does: below glibc's limit for separate mappings, from a thread, under pieces that stay.
_PROGRAM = """
import threading
from pathlib import Path
from specdec.service import memory

def resident_mb():
    return next(int(line.split()[1]) >> 10 for line in Path("/proc/self/status").open() if line.startswith("VmRSS"))

def load():
    pieces = [bytearray(b"x") * (100 << 10) for _ in range(3_000)]
    kept.append(pieces.pop())

kept = []
thread = threading.Thread(target=load)
thread.start()
thread.join()
before = resident_mb()
memory.settle()
print(before - resident_mb())
"""


def test_the_collector_is_off_during_imports_only() -> None:
    def fail() -> None:
        with memory.collector_at_rest():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()


def test_what_a_settled_service_holds_is_not_walked_again() -> None:
    thresholds = gc.get_threshold()
    try:
        memory.settle()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > thresholds[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked to return memory")
def test_memory_freed_by_a_load_goes_back_to_the_system() -> None:
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert int(result.stdout) > 200  # of 300 MB
