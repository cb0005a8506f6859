"""Prepare a release: `python -m tools.prepare_release 0.3.0` in a clean worktree.

Sets the version in `specdec/contract/version.py` and in the files that repeat it for other programs, turns the
section "Unreleased" of the changelog into a section with version and date, and prints the commands that commit, tag and
publish. `--notes TAG` prints the section of a tag, for the workflow of a release. Needs git and no package.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from datetime import UTC, date, datetime
from pathlib import Path

VERSION_FILE = "specdec/contract/version.py"
CHANGELOG = "CHANGELOG.md"
#: Files that repeat the version, with the field before it.
COPIES = {
    "CITATION.cff": "\nversion: ",
    "k8s/chart/Chart.yaml": "\nversion: ",
    "k8s/components/images/kustomization.yaml": "newTag: ",
}
_VERSION = re.compile(r'^__version__ = "(?P<version>[^"]+)"$', re.MULTILINE)
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_UNRELEASED = "## Unreleased\n"

_COMMANDS = """\
Look at the change, then commit, tag and publish it:
  git commit -am "Release {version}"
  git tag -a v{version} -m "specdec {version}"
  git push origin HEAD v{version}      # the workflow of releases builds, publishes and uploads
By hand instead of the workflow:
  make dist sbom images
  python -m twine upload dist/*{version}*
"""


class Refused(Exception):
    """A release that cannot be prepared; the message says why."""


def prepare(root: Path, wanted: str, today: date) -> str:
    """Write version and changelog, and return the commands that follow.

    Raises:
        Refused: there are local changes, the version is malformed, tagged or not above the last one, or nothing is
            unreleased. Nothing has been written.
    """
    if changed := _git(root, "status", "--porcelain").splitlines():
        raise Refused(f"{len(changed)} files have local changes, the first is {changed[0][3:]}; commit or remove them")
    version_text, changelog = (root / VERSION_FILE).read_text(), (root / CHANGELOG).read_text()
    current = _version_in(version_text)
    _require_above(wanted, current, _tags(root))
    dated = _with_dated_section(changelog, wanted, today)
    (root / VERSION_FILE).write_text(_VERSION.sub(f'__version__ = "{wanted}"', version_text))
    for name, field in COPIES.items():
        (root / name).write_text((root / name).read_text().replace(f"{field}{current}", f"{field}{wanted}"))
    (root / CHANGELOG).write_text(dated)
    return _COMMANDS.format(version=wanted)


def notes(root: Path, tag: str) -> str:
    """Return the section of the changelog for a tag.

    Raises:
        Refused: the tag is of another version than the code, or the changelog has no section for it.
    """
    version = _version_in((root / VERSION_FILE).read_text())
    if tag != f"v{version}":
        raise Refused(f"the tag is {tag}, and {VERSION_FILE} has version {version}")
    _, found, after = (root / CHANGELOG).read_text().partition(f"\n## {version} - ")
    section = after.partition("\n## ")[0].partition("\n")[2].strip()
    if not found or not section:
        raise Refused(f"{CHANGELOG} has no section for {version}")
    return f"{section}\n"


def _version_in(text: str) -> str:
    found = _VERSION.search(text)
    if found is None:
        raise Refused(f"{VERSION_FILE} has no __version__")
    return found["version"]


def _tags(root: Path) -> list[str]:
    """Return the versions that are tagged."""
    return [tag.removeprefix("v") for tag in _git(root, "tag", "--list", "v*").split()]


def _require_above(wanted: str, current: str, tagged: list[str]) -> None:
    if _RELEASE.fullmatch(wanted) is None:
        raise Refused(f"version {wanted!r} is not of the form 1.2.3")
    if wanted in tagged:
        raise Refused(f"the tag v{wanted} exists")
    last = max((version for version in (current, *tagged) if _RELEASE.fullmatch(version)), key=_numbers)
    if _numbers(wanted) <= _numbers(last):
        raise Refused(f"version {wanted} is not above the last one, {last}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _with_dated_section(changelog: str, version: str, today: date) -> str:
    """Return the changelog with its unreleased entries below version and date, and an empty section above them."""
    before, found, after = changelog.partition(_UNRELEASED)
    entries = re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0]
    if not found or not re.search(r"^- ", entries, re.MULTILINE):
        raise Refused(f"the section Unreleased of {CHANGELOG} has no entry")
    return f"{before}{_UNRELEASED}\n## {version} - {today.isoformat()}\n{after}"


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout


def main(arguments: list[str], root: Path, today: date) -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.prepare_release", description="Prepare a release.")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("version", nargs="?", metavar="VERSION", help="version of the release, such as 1.2.3")
    chosen.add_argument("--notes", metavar="TAG", help="print the section of the changelog for a tag")
    options = parser.parse_args(arguments)
    try:
        print(notes(root, options.notes) if options.notes else prepare(root, options.version, today), end="")
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path.cwd(), datetime.now(UTC).date()))
