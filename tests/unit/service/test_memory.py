"""What a service does about Python's cyclic garbage collector."""

from __future__ import annotations

import gc

import pytest

from specdec.service import memory


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
