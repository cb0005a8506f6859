"""`specdec timeline`: pictures of rounds, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.__main__ import run
from specdec.cli.timeline import drawn, pictures_of, read_rounds

STAGES = ("received", "decoded", "admitted", "step_began", "step_ended", "answered", "encoded", "sent")


def call(began: int, *, tells_stages: bool = True) -> dict[str, int]:
    """One whose stages take 10, 20, 30, ... us."""
    names = ["asked", "sent", *(f"replica_{stage}" for stage in STAGES), "heard", "answered"]
    times = {name: began + 5 * index * (index + 1) for index, name in enumerate(names)}
    return times if tells_stages else {name: times[name] for name in ("asked", "sent", "heard", "answered")}


def entry(session_id: str, index: int, **calls: Any) -> dict[str, Any]:
    times = {"began_us": 5000 * index, "decided": 1500, "committed": 1700, "shown": 1710}
    return {"session_id": session_id, "round_id": index, "draft": None, "target": call(660)} | times | calls


def written(path: Path, *rounds: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in rounds))
    return path


def test_the_stages_of_both_calls_follow_each_other_and_fill_the_round(tmp_path: Path) -> None:
    file = written(tmp_path / "t", *(entry("a", index, draft=call(0)) for index in range(4)))
    (picture,) = pictures_of(read_rounds(file))
    assert (picture.title, picture.num_rounds, picture.round_ms) == ("rounds with a draft replica", 2, 5.0)
    assert [stage.ms for stage in picture.stages[:11]] == [0.01 * step for step in range(1, 12)]
    assert sum(stage.ms for stage in picture.stages) == pytest.approx(5.0)
    assert [stage.ms for stage in picture.beside] == [0.2, 0.01]
    assert len({stage.title for stage in picture.stages}) == len(picture.stages)
    lines = drawn(picture).splitlines()
    assert len(lines) == 1 + len(picture.stages) + 2
    assert [line.index("\N{FULL BLOCK}") for line in lines if "\N{FULL BLOCK}" in line][-1] > 60


def test_the_first_round_of_a_session_is_in_no_picture(tmp_path: Path) -> None:
    first = entry("a", 0, target=call(100_000))
    file = written(tmp_path / "t", first, entry("a", 1), entry("b", 0, target=call(100_000)), entry("a", 2))
    (picture,) = pictures_of(read_rounds(file))
    assert (picture.title, picture.num_rounds, picture.round_ms) == ("rounds of the target alone", 1, 5.0)


def test_a_call_to_a_replica_without_times_is_one_stage(tmp_path: Path) -> None:
    file = written(tmp_path / "t", *(entry("a", index, draft=call(0, tells_stages=False)) for index in range(3)))
    (picture,) = pictures_of(read_rounds(file))
    assert [(stage.place, stage.work) for stage in picture.stages[:3]] == [
        ("coordinator", "encode, hand over"), ("draft", "the whole call"), ("coordinator", "decode, wake-up"),
    ]  # fmt: skip


def test_lines_that_a_killed_coordinator_left_unfinished_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "t", *(entry("a", index) for index in range(3)))
    whole = file.read_bytes()
    for damage, told in ((whole[:40], "line 4 is damaged"), (b"\xff\n{}\n", "line 4 and 1 more are damaged")):
        file.write_bytes(whole + damage)
        assert run(["timeline", str(file)], {}) == 0
        captured = capsys.readouterr()
        assert captured.err == f"note: {file}: {told} and left out\n"
        assert captured.out.startswith("rounds of the target alone: 1,")


def test_json_has_the_pictures_with_their_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "t", *(entry("a", index, draft=call(0)) for index in range(4)))
    assert run(["timeline", str(file), "--json"], {}) == 0
    (picture,) = json.loads(capsys.readouterr().out)["pictures"]
    assert (picture["num_rounds"], picture["round_ms"]) == (2, 5.0)
    assert picture["stages"][0] == {"place": "coordinator", "work": "encode, hand over", "ms": 0.01, "call": "draft"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file or directory"),
        ("", "holds no session of three rounds or more"),
        ("no json\n", "line 1 is not a round of a timeline"),
        ('{"a": 1}\n', "line 1 is not a round of a timeline"),
        ("[]\n", "line 1 is not a round of a timeline"),
    ],
)
def test_a_file_that_is_not_a_timeline_is_refused_in_one_line(
    content: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "t").write_text(content)
    assert run(["timeline", str(tmp_path / "t")], {}) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
