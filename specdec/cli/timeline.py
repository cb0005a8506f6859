"""`specdec timeline FILE`: draws where the milliseconds of a round go, as the median stages of a round.

The file is what a coordinator wrote with `--timeline` (`coordinator.round.timeline`). Rounds with and without a draft
replica are two pictures. The first round of a session, which reads the prompt, is in neither.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from specdec.cli.json_output import add_json_flag, print_json
from specdec.contract.errors import InvalidRequest

_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"

#: The stages of a call: its first and last time, the place where it is spent, and the work.
_CALL = (
    ("asked", "sent", "coordinator", "encode, hand over"),
    ("sent", "replica_received", "way there", "stream, wake-up"),
    ("replica_received", "replica_decoded", "", "read, check"),
    ("replica_decoded", "replica_admitted", "", "to the device thread"),
    ("replica_admitted", "replica_step_began", "", "admit, wait, plan"),
    ("replica_step_began", "replica_step_ended", "", "steps, sampling from logits"),
    ("replica_step_ended", "replica_answered", "", "back to the event loop"),
    ("replica_answered", "replica_encoded", "", "encode"),
    ("replica_encoded", "replica_sent", "", "hand over"),
    ("replica_sent", "heard", "way back", "stream, wake-up"),
    ("heard", "answered", "coordinator", "decode, wake-up"),
)
#: Stages of a call to a replica that reports no times.
_CLOSED_CALL = (_CALL[0], ("sent", "heard", "", "the whole call"), _CALL[-1])


class Stage(NamedTuple):
    """A stage of a round."""

    place: str
    work: str
    ms: float
    """Median duration."""
    call: str = ""
    """Role of the called replica; "" outside calls."""

    @property
    def title(self) -> str:
        """Name that is unique in its round."""
        call = f"{self.call} call, " if self.call and self.place != self.call else ""
        return f"{call}{self.place}: {self.work}"


class Picture(NamedTuple):
    """The median round of one kind."""

    title: str
    num_rounds: int
    stages: list[Stage]
    """Stages in their order."""
    beside: list[Stage]
    """Stages after the decision, which run beside the next round."""
    round_ms: float
    """Median time between the beginnings of two rounds."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "timeline", description="Draw where the milliseconds of a round go.", allow_abbrev=False
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="file that specdec up or a coordinator wrote with --timeline"
    )
    add_json_flag(parser, "pictures")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the pictures. Raises InvalidRequest if the file has too few rounds or cannot be read."""
    damaged: list[int] = []
    pictures = pictures_of(read_rounds(args.file, damaged.append))
    if damaged:
        others = f" and {len(damaged) - 1} more are" if damaged[1:] else " is"
        print(f"note: {args.file}: line {damaged[0]}{others} damaged and left out", file=sys.stderr)
    if not pictures:
        raise InvalidRequest(f"{args.file} holds no session of three rounds or more", field="FILE")
    if args.json:
        print_json({"pictures": [_as_fields(picture) for picture in pictures]})
        return 0
    print("\n\n".join(drawn(picture) for picture in pictures))
    return 0


def read_rounds(path: Path, note_damaged: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
    """Return the rounds of a file.

    Args:
        path: path of the file.
        note_damaged: called with the number of each damaged line, which a coordinator that is killed may leave.

    Raises:
        InvalidRequest: the file cannot be read, or none of its lines is a round.
    """
    rounds, damaged = [], []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", field="FILE") from error
    for number, line in enumerate(lines, 1):
        entry = _round_in(line)
        if entry is None:
            damaged.append(number)
        else:
            rounds.append(entry)
    if damaged and not rounds:
        raise InvalidRequest(f"{path}: line 1 is not a round of a timeline", field="FILE")
    if note_damaged is not None:
        for number in damaged:
            note_damaged(number)
    return rounds


def _round_in(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    is_round = isinstance(entry, dict) and {"session_id", "began_us", "target", "decided"} <= entry.keys()
    return entry if is_round else None


def pictures_of(rounds: Iterable[dict[str, Any]]) -> list[Picture]:
    """Return a picture of the rounds with a call of a draft replica and one of those without, as far as they exist."""
    sessions: dict[tuple[str | None, str], list[dict[str, Any]]] = {}
    for entry in rounds:
        sessions.setdefault((entry.get("tenant"), entry["session_id"]), []).append(entry)
    with_draft: list[tuple[dict[str, Any], int]] = []
    without: list[tuple[dict[str, Any], int]] = []
    for own in sessions.values():
        for entry, following in pairwise(own[1:]):
            (with_draft if entry["draft"] else without).append((entry, following["began_us"] - entry["began_us"]))
    kinds = {"rounds with a draft replica": with_draft, "rounds of the target alone": without}
    return [_picture(title, entries) for title, entries in kinds.items() if entries]


def _picture(title: str, entries: Sequence[tuple[dict[str, Any], int]]) -> Picture:
    rounds = [entry for entry, _ in entries]
    stages = [stage for role in ("draft", "target") for stage in _call_stages(role, [entry[role] for entry in rounds])]
    stages += [
        Stage("coordinator", "decide, learn", _ms(entry["decided"] - entry["target"]["answered"] for entry in rounds)),
        Stage("coordinator", "text, begin the next round", _ms(whole - entry["decided"] for entry, whole in entries)),
    ]
    beside = [
        Stage("coordinator, store", "commit", _ms(entry["committed"] - entry["decided"] for entry in rounds)),
        Stage("coordinator", "show", _ms(entry["shown"] - entry["committed"] for entry in rounds)),
    ]
    return Picture(title, len(rounds), stages, beside, _ms(whole for _, whole in entries))


def _call_stages(role: str, calls: Sequence[Mapping[str, int] | None]) -> list[Stage]:
    made = [call for call in calls if call]
    if not made:
        return []
    parts = _CALL if all("replica_sent" in call for call in made) else _CLOSED_CALL
    return [
        Stage(place or role, work, _ms(call[end] - call[begin] for call in made), role)
        for begin, end, place, work in parts
    ]


def _ms(microseconds: Iterable[float]) -> float:
    return median(microseconds) / 1e3


def _as_fields(picture: Picture) -> dict[str, Any]:
    stages = {name: [stage._asdict() for stage in getattr(picture, name)] for name in ("stages", "beside")}
    return picture._asdict() | stages


def drawn(picture: Picture) -> str:
    """Return a picture as text: a line per stage, with a bar at its place in the round."""
    whole = sum(stage.ms for stage in picture.stages)
    lines = [f"{picture.title}: {picture.num_rounds}, median {picture.round_ms:.2f} ms (medians of its stages, ms)"]
    at = 0.0
    for stage in picture.stages:
        lines.append(_line(stage, at / whole, stage.ms / whole))
        at += stage.ms
    lines += [_line(stage, 0.0, 0.0) + "beside the next round" for stage in picture.beside]
    return "\n".join(lines)


def _line(stage: Stage, begin: float, share: float) -> str:
    start, length = begin * _WIDTH, share * _WIDTH
    bar = " " * int(start) + "█" * int(length) + _EIGHTHS[int(length % 1 * 8)].strip()
    return f"{stage.place:<18} {stage.work:<34} {stage.ms:6.2f}  {bar}".rstrip() + ("  " if not share else "")
