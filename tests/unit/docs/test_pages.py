"""Form of the documentation: length of lines and of the README, and links from outside of the site.

`make docs` checks the links and anchors between the pages of the site.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from pathlib import Path

import pytest

import specdec
from specdec.contract.version import DISTRIBUTION
from tools.prepare_release import COPIES

ROOT = Path(__file__).resolve().parents[3]
MAX_COLUMNS = 120
MAX_README_LINES = 180

_ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
_HISTORY = ROOT / "docs" / "history"
#: Pages for readers of today. The history keeps tables that are wider.
PAGES = [*_ROOT_PAGES, *(path for path in sorted((ROOT / "docs").rglob("*.md")) if not path.is_relative_to(_HISTORY))]
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)
#: Paths in the repository that a page names.
_PATH = re.compile(
    r"(?<![\w./-])(?:tests|tools|specdec|coordinator|draft_service|bench|examples|models|k8s|protos)/[\w./-]+"
)
_WRITTEN_BY_COMMANDS = {"bench/results/gpu.json"}
#: `docs/…` in code and other files that are no pages.
_MENTION = re.compile(r"\bdocs/[\w./-]+\.(?:md|svg)\b")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_no_line_is_longer_than_the_limit(path: Path) -> None:
    long = [number for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > MAX_COLUMNS]
    assert not long, f"{name_of(path)}: lines {long} have more than {MAX_COLUMNS} characters"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site makes them."""
    return {anchor_of(found["text"]) for found in _HEADING.finditer(_FENCED.sub("", page.read_text()))}


def anchor_of(heading: str) -> str:
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links of a page's text that name no file, or no heading of it."""
    broken = []
    for found in _LINK.finditer(_FENCED.sub("", text)):
        target, _, anchor = found["target"].partition("#")
        if ":" in target or target.startswith("plots/"):  # `make docs` draws the plots and checks these links
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(found["target"])
    return broken


@pytest.mark.parametrize("path", [*PAGES, *sorted(_HISTORY.rglob("*.md"))], ids=name_of)
def test_every_link_leads_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text()) == []


@pytest.mark.parametrize("target", ["docs/missing.md", "docs/protocol.md#no-such-heading"])
def test_a_broken_link_would_be_noticed(target: str) -> None:
    assert broken_links(ROOT / "README.md", f"[text]({target})") == [target]


def test_every_page_that_code_names_exists() -> None:
    files = [
        path
        for top in (
            "specdec",
            "coordinator",
            "draft_service",
            "target_service",
            "bench",
            "protos",
            "examples",
            "models",
        )
        for pattern in ("*.py", "*.proto", "*.md", "*.h", "*.cpp")
        for path in (ROOT / top).rglob(pattern)
    ]
    missing = {
        f"{name_of(path)}: {mention}"
        for path in files
        for mention in _MENTION.findall(path.read_text())
        if not (ROOT / mention).exists()
    }
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_path_that_a_page_names_exists(path: Path) -> None:
    named = {found.rstrip(".") for found in _PATH.findall(path.read_text())}
    missing = {name for name in named if not (ROOT / name).exists()} - _WRITTEN_BY_COMMANDS
    assert not missing


def floors_of_the_house() -> dict[str, int]:
    """Return the floor of each package of the product."""
    layers = tomllib.loads((ROOT / "tests/architecture/layers.toml").read_text())
    floors = {name.removeprefix("specdec."): floor for name, floor in layers["floors"].items() if name != "bench"}
    return {name: floor for name, floor in floors.items() if "." not in name}


def test_the_architecture_lists_every_package_with_its_floor() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(?:specdec/)?(\w+)` \|", page, re.MULTILINE)
    assert {name: int(floor) for floor, name in rows} == floors_of_the_house()


def test_the_structure_lists_every_package_above_those_that_import_it() -> None:
    section = (ROOT / "docs" / "structure.md").read_text().partition("## Packages")[2]
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^- (`.*?): ", section, re.MULTILINE)))
    floors = floors_of_the_house()
    floors.pop("v1")  # generated; the page names protos
    assert set(listed) >= set(floors)
    order = [floors[name] for name in listed if name in floors]
    assert order == sorted(order)


def test_the_project_is_built_under_the_name_that_the_code_knows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = {re.split(r"[\[=<>]", line)[0] for lines in project["optional-dependencies"].values() for line in lines}
    assert project["name"] == DISTRIBUTION
    assert {name for name in own if name.startswith("specdec")} == {DISTRIBUTION}


@pytest.mark.parametrize(("name", "field"), COPIES.items())
def test_a_file_for_other_programs_repeats_the_version_of_the_code(name: str, field: str) -> None:
    found = re.findall(rf"{field}([\d.]+)", (ROOT / name).read_text())
    assert set(found) == {specdec.__version__}


def test_the_recipe_of_a_sampling_field_names_every_file_that_has_the_example() -> None:
    recipe = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a sampling field")[2].partition("\n## ")[0]
    named = {Path(name).name for name in re.findall(r"`([\w/]+\.\w+)`", recipe)}
    tops = ("specdec", "coordinator", "draft_service", "target_service", "gateway", "protos")
    files = [
        path for top in tops for path in (ROOT / top).rglob("*.*") if path.suffix in (".py", ".proto", ".js", ".html")
    ]
    having = {path.name for path in files if re.search(r"\bmin_p\b", path.read_text())}
    assert {name for name in having if "_pb2" not in name} - named == set()
