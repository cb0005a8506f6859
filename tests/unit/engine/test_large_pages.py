"""Memory that every step reads is requested with large pages, and is resident only once written."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from specdec.engine.base import SequenceSlice, StepPlan
from specdec.engine.large_pages import LargePages, zeros
from specdec.engine.loader import load_worker
from specdec.engine.options import CompileOptions, LoadRequest
from tests.support.tiny_models import build_tiny_model

MAPPINGS = Path("/proc/self/smaps")
needs_large_pages = pytest.mark.skipif(
    not (MAPPINGS.exists() and Path("/sys/kernel/mm/transparent_hugepage").exists()), reason="no large pages to ask for"
)


def resident_bytes(*, large: bool) -> int:
    """Return the resident bytes of this process, in all of its memory or where large pages are requested (`hg`)."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", MAPPINGS.read_text(), flags=re.MULTILINE)[1:]
    counted = [mapping for mapping in mappings if not large or re.search(r"^VmFlags:.* hg\b", mapping, re.MULTILINE)]
    return sum(1024 * int(size) for mapping in counted for size in re.findall(r"^Rss: +(\d+)", mapping, re.MULTILINE))


@needs_large_pages
def test_weights_and_kv_of_native_kernels_are_in_memory_with_large_pages(tmp_path: Path) -> None:
    directory = build_tiny_model("llama", tmp_path, vocabulary_size=96, context=256)
    gc.collect()  # models of earlier tests would be freed during this one
    before = resident_bytes(large=True)
    worker = load_worker(
        LoadRequest(
            str(directory),
            device="cpu",
            dtype="float32",
            num_kv_blocks=4,
            compiling=CompileOptions("native"),
            self_check=False,
        )
    )
    loaded = resident_bytes(large=True)
    worker.execute(StepPlan((SequenceSlice((5,), 0, (0,), 1),)))
    assert loaded - before >= worker.weight_bytes / 2  # the embeddings are in other memory
    assert resident_bytes(large=True) > loaded


@needs_large_pages
def test_a_pool_takes_no_memory_before_it_is_written() -> None:
    before = resident_bytes(large=False)
    pool = zeros(1 << 30)
    assert resident_bytes(large=False) - before < 1 << 24
    assert not pool[:4096].any()


def test_too_large_an_allocation_raises_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes of memory"):
        zeros(1 << 60)


def test_copies_keep_their_numbers_their_order_and_their_memory() -> None:
    pages = LargePages()
    tables = [torch.randn(7, 5).T, torch.arange(11), torch.empty(0, dtype=torch.int64), torch.randn(9 << 20).half()]
    copies = [pages.copy(table) for table in tables]
    more = pages.copy(torch.ones(3))
    del pages
    for table, copied in zip(tables, copies, strict=True):
        assert copied.is_contiguous()
        assert torch.equal(copied, table)
        assert copied.data_ptr() % 64 == 0
    assert torch.equal(more, torch.ones(3))
    assert 0 < copies[1].data_ptr() - copies[0].data_ptr() <= 192
