"""Mutants of the store's Lua scripts, and which of them the contract tests let live.

A text mutator: comparisons, logic and numbers are turned, conditions are forced either way, calls of Redis are left
out. Every mutant is one changed line. Not for Python (mutmut). Called by `tools.mutants`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path("specdec/state/scripts")
TESTS = "tests/contract/test_store_*.py"
REGISTRY_SCRIPTS = ("publish.lua", "remove.lua", "replicas.lua")
REGISTRY_TESTS = "tests/contract/test_registry_conformance.py"
#: What runs in memory first; a Redis of its own, whose start costs more than most tests, for what outlives that.
SELECTIONS = ("memory", "not memory and not embedded")
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=60"]
NUM_WORKERS = 2

#: What is looked for in a line without its comment, and what may stand in its place.
_TURNS: list[tuple[str, tuple[str, ...]]] = [
    (r"==", ("~=",)),
    (r"~=", ("==",)),
    (r"<=", ("<", ">")),
    (r">=", (">", "<")),
    (r"(?<![<>=~])<(?!=)", ("<=", ">=")),
    (r"(?<![<>=~])>(?!=)", (">=", "<=")),
    (r"\band\b", ("or",)),
    (r"\bor\b", ("and",)),
    (r"\bnot ", ("",)),
    (r" \+ ", (" - ",)),
    (r" - ", (" + ",)),
    (r" \* ", (" / ",)),
    (r"(?<![\w\[.'%])(\d+)(?![\w\].'])", ("{} + 1",)),
    (r"'[01]'", ("'2'",)),
]
_FORCED = re.compile(r"\b(if|elseif) (.+) then")
_CALL = re.compile(r"^\s*redis\.call\(.*\)\s*$")


class LuaMutant(NamedTuple):
    """One changed line of a script."""

    script: str
    number: int
    """Number of the line, from 1."""
    before: str
    after: str

    @property
    def path(self) -> str:
        return f"{SCRIPTS}/{self.script}"

    @property
    def change(self) -> str:
        """Names it as long as the line stays the same."""
        return f"{self.script}: {self.before.strip()} => {self.after.strip()}"


def mutants_of(script: str, text: str) -> Iterator[LuaMutant]:
    """Every mutant of a script. Conditions over several lines are forced nowhere, but turned in each line."""
    for number, line in enumerate(text.splitlines(), start=1):
        code, dashes, comment = line.partition("--")
        changed = set()
        for pattern, replacements in _TURNS:
            for match in re.finditer(pattern, code):
                for replacement in replacements:
                    new = replacement.format(match.group())
                    changed.add(code[: match.start()] + new + code[match.end() :])
        if forced := _FORCED.search(code):
            for constant in ("true", "false"):
                changed.add(f"{code[: forced.start()]}{forced.group(1)} {constant} then{code[forced.end() :]}")
        if _CALL.match(code):
            changed.add("")
        for after in sorted(changed - {code}):
            yield LuaMutant(script, number, line, after + dashes + comment)


def all_mutants() -> list[LuaMutant]:
    return [
        mutant for path in sorted((ROOT / SCRIPTS).glob("*.lua")) for mutant in mutants_of(path.name, path.read_text())
    ]


class _Copy:
    """A copy of the tree with one process that has the tests' imports done and forks for every mutant."""

    def __init__(self, directory: Path) -> None:
        for name in ("specdec", "tests", "tools"):
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
        shutil.copy(ROOT / "pyproject.toml", directory)
        self._scripts = directory / SCRIPTS
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(directory)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def passes(self, tests: str) -> bool:
        """Return whether the tests, a glob of files, pass on the scripts as they are now."""
        return all(self._passes(tests, selection) for selection in SELECTIONS)

    def _passes(self, tests: str, selection: str) -> bool:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(tests, selection, file=self._process.stdin, flush=True)
        return self._process.stdout.readline() == "0\n"

    def outlives(self, mutant: LuaMutant) -> bool:
        path = self._scripts / mutant.script
        text = path.read_text()
        lines = text.splitlines()
        lines[mutant.number - 1] = mutant.after
        path.write_text("\n".join(lines) + "\n")
        try:
            return self.passes(REGISTRY_TESTS if mutant.script in REGISTRY_SCRIPTS else TESTS)
        finally:
            path.write_text(text)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve() -> None:
    """Answers each line, a glob of files and a selection of their tests, with the outcome in a child of its own."""
    import pytest

    import specdec.state.embedded
    import specdec.state.redis_store  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sink = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(sink, stream)
            tests, selection = line.strip().split(" ", 1)
            files = sorted(map(str, Path().glob(tests)))
            os._exit(int(pytest.main([*files, "-k", selection, *OPTIONS])))
        _, status = os.waitpid(child, 0)
        print(status, flush=True)


def survivors(mutants: list[LuaMutant]) -> list[LuaMutant]:
    """Those that the contract tests do not notice.

    Raises:
        RuntimeError: the tests fail on the scripts as they are.
    """
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[_Copy] = SimpleQueue()
        made = [_Copy(Path(folder) / str(index)) for index in range(NUM_WORKERS)]
        try:
            if not all(made[0].passes(tests) for tests in (TESTS, REGISTRY_TESTS)):
                raise RuntimeError("the contract tests fail on the scripts as they are")
            for copy in made:
                copies.put(copy)

            def survives(mutant: LuaMutant) -> bool:
                copy = copies.get()
                try:
                    return copy.outlives(mutant)
                finally:
                    copies.put(copy)

            with ThreadPoolExecutor(NUM_WORKERS) as pool:
                fates = list(pool.map(survives, mutants))
        finally:
            for copy in made:
                copy.close()
    return [mutant for mutant, is_alive in zip(mutants, fates, strict=True) if is_alive]


if __name__ == "__main__":
    _serve()
