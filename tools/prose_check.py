"""Find sentences that house style refuses: `python -m tools.prose_check [PATH...]` (part of `make lint`).

Three kinds of text are read: docstrings and comments of Python files, messages (string arguments of loggers, errors and
`help=`), and Markdown. Each line of output is `FILE:LINE: FORM: text`. A count above its limit in
`tools/prose_limits.toml` fails the check.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMITS = Path(__file__).with_name("prose_limits.toml")
PRODUCT = ("specdec/", "coordinator/", "draft_service/", "target_service/", "gateway/")

#: First words of a docstring that is a fragment instead of a sentence or a noun phrase.
FRAGMENT = re.compile(
    r"(Of|Whether|That|Those|As|By|Told|Where|How|What|When|Who|Whose|Which|To|From|For|With|Without|Also|Same|"
    r"The same|Until|Unless|Hardly|Once|If|Has|Had|Is|Are|Nothing|None of)\b(?!_)"
)
#: Forms that a reader has to decode.
FORMS = {
    "person": re.compile(
        r"\b(whoever|whomever|whosoever|nobody|somebody|anybody|everybody|somebody's|nobody's)\b", re.I
    ),
    "so many": re.compile(r"\bso (many|much|long|few) (?!that|as)", re.I),
    "is no": re.compile(
        r"(?<!there )\b(is|are|was|were) no (?!longer\b|more than\b|less than\b|fewer than\b|later than\b|way to\b)",
        re.I,
    ),
    "as good as": re.compile(r"\bas good as\b", re.I),
    "aside": re.compile(r"\bNot here\b"),
    "quaint": re.compile(
        r"\b(hardly|ere|nought|naught|whereof|therein|thereof|hitherto|betake|of its own accord|all the same|"
        r"none the less|a moment ago|by itself alone|goes without|of old|in one piece|is well again|serves on)\b",
        re.I,
    ),
}
#: Calls whose string arguments are read by operators and users.
_MESSAGE_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}


class Finding(NamedTuple):
    """One refused form."""

    path: str
    line: int
    kind: str
    """`docstring`, `comment`, `message` or `page`."""
    form: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.form}: {self.text[:100]}"


def findings_of_python(path: str, source: str) -> Iterator[Finding]:
    """Yield the findings in one Python file."""
    tree = ast.parse(source)
    docstring_lines: set[int] = set()
    for node, text, line in _docstrings(tree):
        docstring_lines.add(line)
        if FRAGMENT.match(text) and not _is_sentence(node, text):
            yield Finding(path, line, "docstring", "fragment", text.splitlines()[0])
        yield from _forms(path, line, "docstring", text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _forms(path, token.start[0], "comment", token.string)
    for line, text in _messages(tree):
        yield from _forms(path, line, "message", text)


def findings_of_markdown(path: str, source: str) -> Iterator[Finding]:
    """Yield the findings in one Markdown page; blocks of code are skipped."""
    in_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield from _forms(path, number, "page", line)


def _forms(path: str, line: int, kind: str, text: str) -> Iterator[Finding]:
    for form, pattern in FORMS.items():
        for match in pattern.finditer(text):
            begin = text.rfind("\n", 0, match.start()) + 1
            yield Finding(
                path, line + text[: match.start()].count("\n"), kind, form, text[begin:].splitlines()[0].strip()
            )


def _docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int]]:
    """Yield (owner, text, line) of the docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            continue
        for index, statement in enumerate(body):
            is_text = (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            )
            is_first = index == 0
            is_after_field = index > 0 and isinstance(body[index - 1], ast.AnnAssign | ast.Assign)
            if is_text and (is_first or is_after_field):
                yield node, statement.value.value.strip(), statement.lineno


def _is_sentence(node: ast.AST, text: str) -> bool:
    """Return whether a docstring that begins with a conjunction goes on to a main clause ("If X, do Y.")."""
    first = re.split(r"(?<=[.:;])\s", text, maxsplit=1)[0]
    return bool(
        re.match(r"(If|When|Until|Unless|Once|For|With|Without|From|To)\b[^.]*, \w+", first)
    ) and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of strings given to loggers, to errors that are raised, and to `help=`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            arguments = [*node.exc.args, *(keyword.value for keyword in node.exc.keywords)]
        elif isinstance(node, ast.Call):
            is_log = isinstance(node.func, ast.Attribute) and node.func.attr in _MESSAGE_METHODS
            arguments = list(node.args) if is_log else []
            arguments += [keyword.value for keyword in node.keywords if keyword.arg == "help"]
        else:
            continue
        for argument in arguments:
            for part in ast.walk(argument):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def tracked_files() -> list[str]:
    """Return the repository's Python files and user pages, but for generated code and history."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md"]
    files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    skipped = ("specdec/v1/", "docs/history/", "docs/adr/", "tools/prose_check.py", "bench/prompts/")
    return [path for path in files if not path.startswith(skipped) and (ROOT / path).is_file()]


def find(paths: list[str]) -> list[Finding]:
    """Return the findings in files, in order."""
    found: list[Finding] = []
    for path in paths:
        source = (ROOT / path).read_text(encoding="utf-8")
        found += findings_of_python(path, source) if path.endswith(".py") else findings_of_markdown(path, source)
    return found


def counts(found: list[Finding]) -> dict[str, int]:
    """Return how many findings fall under each limit."""
    tally: Counter[str] = Counter()
    for finding in found:
        if finding.path.startswith(PRODUCT):
            tally["messages" if finding.kind == "message" else finding.form.replace(" ", "_")] += 1
        elif finding.path.endswith(".md"):
            tally["pages"] += 1
        else:
            tally["tests_and_bench"] += 1
    return dict(tally)


def main() -> int:
    paths = sys.argv[1:] or tracked_files()
    paths = [file for path in paths for file in ([path] if (ROOT / path).is_file() else
             [tracked for tracked in tracked_files() if tracked.startswith(path.rstrip("/") + "/")])]  # fmt: skip
    found = find(paths)
    limits = tomllib.loads(LIMITS.read_text(encoding="utf-8"))
    seen = counts(found)
    over = [name for name, count in seen.items() if count > limits.get(name, 0)]
    if over or sys.argv[1:]:
        print("\n".join(map(str, found)))
    print(
        "prose:",
        ", ".join(f"{name} {count} of {limits.get(name, 0)}" for name, count in sorted(seen.items())) or "clean",
    )
    return 1 if over and not sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
