"""Names that users and stored data rely on, written down once: none may appear, vanish or change unnoticed.

They are the flags of the four programs, metrics, Redis keys, digests of the Lua scripts, services and messages of the
protocol, and the names of the Python client. `python -m tools.public_names` records them afresh, after a change that
is meant to add or remove one.
"""

from __future__ import annotations

import json
from copy import deepcopy

import pytest

from tools.public_names import ROOT, SNAPSHOT, Names, collect, flat_names

COMMAND = "python -m tools.public_names"


def difference(recorded: Names, current: Names) -> list[str]:
    """Return a line for each name that was added (+) or removed (-); a changed one has both."""
    before, now = flat_names(recorded), flat_names(current)
    removed = [f"- {name}" for name in before - now]
    return sorted([*removed, *(f"+ {name}" for name in now - before)], key=lambda line: (line[2:], line))


@pytest.fixture(scope="module")
def current() -> Names:
    return collect()


def test_public_names_are_those_that_were_recorded(current: Names) -> None:
    changes = difference(json.loads(SNAPSHOT.read_text(encoding="utf-8")), current)
    assert not changes, "\n".join(
        ["public names differ from the recording (+ added, - removed):", *changes, f"if this is meant, run {COMMAND}"]
    )


def test_every_kind_of_name_is_collected(current: Names) -> None:
    lines = flat_names(current)
    assert {
        "client / AsyncClient",
        "flags / draft_service / --listen",
        "flags / target_service / --model",
        "flags / coordinator / --redis-url",
        "flags / specdec up / --target",
        "flags / specdec generate / --help",
        "metrics / coordinator / specdec:wire_bytes = counter",
        "metrics / replicas / specdec:kv_cache_usage_perc = gauge",
        "metrics / replicas / specdec:kv_tier_bytes = counter",
        "redis_keys / specdec:TENANT:{SESSION}:tokens",
        "redis_keys / specdec-kv:1:FINGERPRINT:DTYPE:RANK:NAME",
    } <= lines
    assert len(current["lua_sha1"]) == len(list((ROOT / "specdec" / "state" / "scripts").glob("*.lua")))
    assert {"Propose", "Verify"} <= {method for of in current["proto"]["services"].values() for method in of}


def test_an_added_a_removed_and_a_changed_name_are_told(current: Names) -> None:
    """Negative control."""
    changed = deepcopy(current)
    changed["flags"]["specdec up"].append("--new-flag")
    changed["client"].remove("Client")
    changed["lua_sha1"]["commit.lua"] = "0"
    digest = current["lua_sha1"]["commit.lua"]
    assert difference(current, changed) == [
        "- client / Client",
        "+ flags / specdec up / --new-flag",
        *sorted([f"- lua_sha1 / commit.lua = {digest}", "+ lua_sha1 / commit.lua = 0"], key=lambda line: line[2:]),
    ]
    assert not difference(current, deepcopy(current))
