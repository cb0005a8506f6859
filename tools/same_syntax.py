"""Compare the syntax trees of two revisions without docstrings and comments.

`python -m tools.same_syntax BASE [HEAD] [--messages]` prints every Python file whose code differs, with its
first differing top-level definition, and exits with 1 if there is one, so that a commit of prose can be shown to
change no behaviour. Without HEAD the working tree is compared. `--messages` also ignores the text of string literals.
Renamed files are paired by git.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def code_of(source: str, *, ignore_messages: bool = False) -> str:
    """Return a dump of a file's code: equal for two files that differ in docstrings and comments alone.

    Args:
        source: Python source.
        ignore_messages: replace every string literal by an empty one.
    """
    return "\n".join(_dump(node) for node in _bare_tree(source, ignore_messages=ignore_messages).body)


def first_difference(before: str, after: str, *, ignore_messages: bool = False) -> str | None:
    """Return the name of the first top-level definition whose code differs; None where the code is the same.

    Args:
        before: Python source.
        after: Python source to compare with.
        ignore_messages: see `code_of`.
    """
    trees = [_bare_tree(source, ignore_messages=ignore_messages) for source in (before, after)]
    for old, new in zip_longest(*(tree.body for tree in trees)):
        if old is None or new is None or _dump(old) != _dump(new):
            return _name_of(new if new is not None else old)
    return None


def differing_files(
    base: str, head: str | None, *, ignore_messages: bool = False, root: Path = ROOT
) -> list[tuple[str, str]]:
    """Return the Python files whose code differs between two revisions, each with where it differs first.

    Args:
        base: a revision.
        head: a revision; None: the tracked files of the working tree.
        ignore_messages: see `code_of`.
        root: folder of the repository.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout

    differing = []
    rows = git("diff", "--name-status", "-M40", base, *([head] if head else []), "--", "*.py").splitlines()
    for row in rows:
        status, *paths = row.split("\t")
        if status[0] in "AD":
            differing.append((paths[0], "added" if status == "A" else "deleted"))
            continue
        before = git("show", f"{base}:{paths[0]}")
        after = git("show", f"{head}:{paths[-1]}") if head else (root / paths[-1]).read_text(encoding="utf-8")
        where = first_difference(before, after, ignore_messages=ignore_messages)
        if where is not None:
            differing.append((paths[-1], where))
    return differing


def _bare_tree(source: str, *, ignore_messages: bool) -> ast.Module:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_text(statement)] or [ast.Pass()]
        if ignore_messages and isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
        if ignore_messages and isinstance(node, ast.JoinedStr):
            node.values = [part for part in node.values if not isinstance(part, ast.Constant)]
    return tree


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _dump(node: ast.AST) -> str:
    # A stub whose body is "..." and one whose body was a docstring alone mean the same.
    return ast.dump(node).replace("Expr(value=Constant(value=Ellipsis))", "Pass()")


def _name_of(statement: ast.stmt) -> str:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return statement.name
    line = getattr(statement, "lineno", 1)  # a file of prose alone became a Pass without a line
    return f"line {line}: {ast.unparse(statement).splitlines()[0][:80]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare code without docstrings and comments.")
    parser.add_argument("base", help="revision to compare with")
    parser.add_argument("head", nargs="?", help="revision; without it the working tree")
    parser.add_argument("--messages", action="store_true", help="ignore the text of string literals too")
    arguments = parser.parse_args()
    differing = differing_files(arguments.base, arguments.head, ignore_messages=arguments.messages)
    for path, where in differing:
        print(f"{path}: {where}")
    print(f"{len(differing)} files differ in code")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
