"""Compare the syntax trees of two revisions without docstrings and comments.

`python -m tests.support.same_syntax BASE [HEAD] [--messages]` prints every Python file whose code differs and exits
with 1 if there is one, so that a commit of prose can be shown to change no behaviour. Without HEAD the working tree is
compared. `--messages` also ignores the text of string literals. Renamed files are paired by git.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def code_of(source: str, *, ignore_messages: bool = False) -> str:
    """Return a dump of a file's code: equal for two files that differ in docstrings and comments alone.

    Args:
        source: Python source.
        ignore_messages: replace every string literal by an empty one.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            node.body = [statement for statement in body if not _is_text(statement)] or [ast.Pass()]
        if ignore_messages and isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
        if ignore_messages and isinstance(node, ast.JoinedStr):
            node.values = [part for part in node.values if not isinstance(part, ast.Constant)]
    # A stub whose body is "..." and one whose body was a docstring alone mean the same.
    return ast.dump(tree).replace("Expr(value=Constant(value=Ellipsis))", "Pass()")


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def differing_files(base: str, head: str | None, *, ignore_messages: bool = False) -> list[str]:
    """Return the Python files whose code differs between two revisions, with added and deleted ones.

    Args:
        base: a revision.
        head: a revision; None: the working tree.
        ignore_messages: see `code_of`.
    """
    command = ["diff", "--name-status", "-M40", base, *([head] if head else []), "--", "*.py"]
    differing = []
    for row in _git(*command).splitlines():
        status, *paths = row.split("\t")
        if status[0] in "AD":
            differing.append(f"{paths[0]} ({'added' if status == 'A' else 'deleted'})")
            continue
        before = _git("show", f"{base}:{paths[0]}")
        after = _git("show", f"{head}:{paths[-1]}") if head else (ROOT / paths[-1]).read_text(encoding="utf-8")
        codes = [code_of(source, ignore_messages=ignore_messages) for source in (before, after)]
        if codes[0] != codes[1]:
            differing.append(paths[-1])
    return differing


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare code without docstrings and comments.")
    parser.add_argument("base", help="revision to compare with")
    parser.add_argument("head", nargs="?", help="revision; without it the working tree")
    parser.add_argument("--messages", action="store_true", help="ignore the text of string literals too")
    arguments = parser.parse_args()
    differing = differing_files(arguments.base, arguments.head, ignore_messages=arguments.messages)
    for path in differing:
        print(path)
    print(f"{len(differing)} files differ in code")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
