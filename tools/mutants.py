"""What `make mutants` runs: mutmut over the Python of pyproject.toml, then the store's Lua; and what it tells.

    python -m tools.mutants [--lua] [PATTERN...]     for instance 'specdec.core.rejection.*'

Every survivor is shown as the lines it changes. Those in `equivalent_mutants.toml` change nothing that can be seen, for
the reason given there, and are only counted. Not a test: exit code 1 where another one lives. Minutes to hours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.lua_mutants import ROOT, LuaMutant, all_mutants, survivors

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
ALIVE = ("survived", "no tests", "suspicious")


class Outcome(NamedTuple):
    """What became of one mutant."""

    path: str
    status: str
    """killed, timeout, survived, no tests, ...; as mutmut has it."""
    change: str
    """Where it is and what it changes; names it as long as the line stays the same."""


def python_outcomes(patterns: Sequence[str]) -> list[Outcome]:
    """Runs mutmut from the start: of what it tried before it would not notice that a test has changed."""
    shutil.rmtree(ROOT / "mutants", ignore_errors=True)
    subprocess.run([Path(sys.executable).with_name("mutmut"), "run", *patterns], cwd=ROOT, check=True)
    os.chdir(ROOT)
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code
    from mutmut.utils.file_utils import walk_mutatable_files

    outcomes = []
    for path in walk_mutatable_files():
        mutants = SourceFileMutationData(path=path)
        mutants.load()
        for name, exit_code in mutants.exit_code_by_key.items():
            status = status_by_exit_code[exit_code]
            change = _change(name, get_diff_for_mutant(name, path=path)) if status in ALIVE else ""
            outcomes.append(Outcome(str(path), status, change))
    return outcomes


def _change(name: str, diff: str) -> str:
    """`function: line => line` of a mutant's diff."""
    function = name.rpartition(".")[2].partition("__mutmut_")[0].removeprefix("x_").strip("xǁ").replace("ǁ", ".")
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    removed, added = (" ".join(line[1:].strip() for line in lines if line[:1] == sign) for sign in "-+")
    return f"{function}: {removed} => {added}"


def lua_outcomes() -> list[Outcome]:
    mutants = all_mutants()
    living = set(survivors(mutants))

    def outcome(mutant: LuaMutant) -> Outcome:
        return Outcome(mutant.path, "survived" if mutant in living else "killed", mutant.change)

    return [outcome(mutant) for mutant in mutants]


def report(outcomes: Sequence[Outcome]) -> bool:
    """Prints a table and the survivors; returns whether all of them are known to change nothing."""
    equivalent = {change for group in tomllib.loads(EQUIVALENT.read_text())["group"] for change in group["mutants"]}
    known = [o for o in outcomes if o.status in ALIVE and o.change in equivalent]
    living = [o for o in outcomes if o.status in ALIVE and o.change not in equivalent]
    print(f"\n{'file':<44}{'mutants':>8}{'killed':>8}{'equivalent':>11}{'survivors':>10}")
    columns = [Counter(o.path for o in group) for group in (outcomes, known, living)]
    for path in [*columns[0], "all"]:
        tried, same, alive = (column.total() if path == "all" else column[path] for column in columns)
        print(f"{path:<44}{tried:>8}{tried - same - alive:>8}{same:>11}{alive:>10}")
    for o in living:
        print(f"\n{o.path} ({o.status})\n    {o.change}")
    return not living


def main(arguments: Sequence[str]) -> int:
    began = time.monotonic()
    outcomes = [] if "--lua" in arguments else python_outcomes(arguments)
    outcomes = [outcome for outcome in outcomes if outcome.status != "not checked"]
    if not arguments or "--lua" in arguments:
        outcomes += lua_outcomes()
    is_clean = report(outcomes)
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
