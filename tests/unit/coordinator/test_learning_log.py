"""The retention of a learning log, and the checks of its segments when they are read."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specdec.contract.errors import InvalidRequest
from specdec.contract.tenant import DEFAULT_TENANT
from specdec.learning.log_files import LogFacts, LoggedTurn, encode_segment, read_segment
from tests.support.logged import CountedLog, logged

FACTS = LogFacts("target", "words", 100)
TURN = LoggedTurn(
    session=7, temperature=1.0, token_ids=np.array([4, 5, 6, 7], np.uint32), start=2,
    num_entries=np.array([2, 1], np.uint8), entry_ids=np.array([6, 9, 7], np.uint32),
    entry_weights=np.array([1 << 30, 1 << 29, 1 << 31], np.uint32),
)  # fmt: skip


def write(log: CountedLog, turn: LoggedTurn = TURN) -> None:
    log.put(lambda: log.add(DEFAULT_TENANT, FACTS, turn))


def test_a_segment_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(encode_segment(FACTS, [TURN, replace(TURN, session=2**64 - 1, temperature=0.0)]))
    facts, (first, second) = read_segment(path)
    assert facts == FACTS
    assert (second.session, second.temperature) == (2**64 - 1, 0.0)
    for name in ("token_ids", "num_entries", "entry_ids", "entry_weights"):
        assert getattr(first, name).tolist() == getattr(second, name).tolist() == getattr(TURN, name).tolist()
    assert first.start == 2


def test_segments_that_are_too_old_or_beyond_the_size_limit_are_deleted(tmp_path: Path) -> None:
    first = CountedLog(tmp_path, max_age_s=100.0)
    write(first)
    first.close()
    (segment,) = (tmp_path / "tenant-default").iterdir()
    content = segment.read_bytes()
    (segment.parent / "left.unfinished").write_bytes(b"x")
    for age_s, name in ((150, "old"), (90, "middle"), (50, "new")):
        path = segment.with_name(f"{name}.safetensors")
        path.write_bytes(content)
        os.utime(path, (segment.stat().st_mtime - age_s,) * 2)
    os.utime(segment.parent / "left.unfinished", (0, 0))
    now_s = segment.stat().st_mtime
    CountedLog(tmp_path, max_age_s=100.0, clock=lambda: now_s).close()
    assert {path.stem for path in segment.parent.iterdir()} == {segment.stem, "middle", "new"}
    CountedLog(tmp_path, max_bytes=2 * len(content), max_age_s=100.0, clock=lambda: now_s).close()
    assert {path.stem for path in segment.parent.iterdir()} == {segment.stem, "new"}
    last = CountedLog(tmp_path, max_bytes=len(content), max_age_s=100.0, clock=lambda: now_s)
    write(last, replace(TURN, session=8))
    last.close()
    assert [turn.session for turn in logged(tmp_path)[1]] == [8]


def test_turns_of_two_targets_are_in_two_segments(tmp_path: Path) -> None:
    log = CountedLog(tmp_path)
    write(log)
    log.put(lambda: log.add(DEFAULT_TENANT, replace(FACTS, target_fingerprint="other"), TURN))
    log.close()
    assert {facts.target_fingerprint for facts in logged(tmp_path)[0]} == {"target", "other"}


def test_a_damaged_segment_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    content = encode_segment(FACTS, [TURN])
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(InvalidRequest, match=r"s\.safetensors is not a learning log segment: [^\n]+$"):
            read_segment(path)


class Trap:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, ("exit 3",))


def test_a_pickle_is_refused_without_loading_it(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InvalidRequest, match="is not a learning log segment"):
        read_segment(path)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("token_ids", np.array([4, 5, 6, 100], np.uint32), "outside its vocabulary"),
        ("entry_ids", np.array([6, 100, 7], np.uint32), "outside its vocabulary"),
        ("entry_ids", np.array([6, 6, 7], np.uint32), "names a token twice"),
        ("entry_weights", np.array([1 << 31, 1 << 31, 1], np.uint32), "more than 1"),
        ("entry_weights", np.array([1, 0, 1], np.uint32), "an entry of weight 0"),
        ("num_entries", np.array([3, 1], np.uint8), "do not match its turns"),
        ("num_entries", np.array([0, 65], np.uint8), "do not match its turns"),
        ("starts", np.array([0], np.uint32), "do not match its tokens"),
        ("starts", np.array([4], np.uint32), "do not match its tokens"),
        ("num_tokens", np.array([2**32 - 1], np.uint32), "do not match its tokens"),
        ("sessions", np.array([1, 2], np.uint64), "differ in length"),
        ("temperatures", np.array([np.nan], np.float32), "temperature"),
        ("temperatures", np.array([1.0], np.float64), "is not a one-dimensional array of float32"),
        ("more", np.array([1]), "not those of the format"),
    ],
)
def test_a_segment_with_impossible_values_is_refused(tmp_path: Path, name: str, value: np.ndarray, words: str) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(encode_segment(FACTS, [TURN]))
    metadata = {
        "format": "specdec-learning-log", "version": "1", "target_fingerprint": "t", "vocabulary_fingerprint": "v",
        "vocabulary_size": "100",
    }  # fmt: skip
    save_file(load_file(path) | {name: value}, path, metadata)
    with pytest.raises(InvalidRequest, match=words):
        read_segment(path)


def test_turns_of_two_tenants_are_in_two_folders_with_their_own_limits(tmp_path: Path) -> None:
    log = CountedLog(tmp_path, max_bytes=1)
    for tenant in ("a", "b"):
        log.put(lambda tenant=tenant: log.add(tenant, FACTS, replace(TURN, session=ord(tenant))))
    log.put(lambda: log.add("b", FACTS, replace(TURN, session=9)))
    log.close()
    assert log.counts == {"written": 6}
    kept = CountedLog(tmp_path)
    for tenant in ("a", "b"):
        kept.put(lambda tenant=tenant: kept.add(tenant, FACTS, replace(TURN, session=ord(tenant))))
    kept.close()
    for tenant in ("a", "b"):
        assert [turn.session for turn in logged(tmp_path, tenant)[1]] == [ord(tenant)]


@pytest.mark.parametrize(("serves_all_tenants", "left"), [(True, []), (False, ["old"])])
def test_old_texts_of_tenants_that_send_nothing_are_deleted_where_all_tenants_are_served(
    tmp_path: Path, serves_all_tenants: bool, left: list[str]
) -> None:
    first = CountedLog(tmp_path, "acme")
    first.put(lambda: first.add("acme", FACTS, TURN))
    first.close()
    (segment,) = (tmp_path / "tenant-acme").iterdir()
    old = segment.rename(segment.with_name("old.safetensors"))
    os.utime(old, (0, 0))
    log = CountedLog(tmp_path, serves_all_tenants=serves_all_tenants)
    log.close()
    assert [path.stem for path in (tmp_path / "tenant-acme").iterdir()] == left
