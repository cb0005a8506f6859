"""Checks of the installation: versions of Python and packages, extras, native kernels, and the cache folder."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from specdec.checkpoints.artifact_cache import cache_directory, make_folder
from specdec.cli.checks.finding import Finding, fail, ok, warn
from specdec.cli.extras import missing_modules
from specdec.contract.version import DISTRIBUTION, __version__, install_command

_PYTHONS = ((3, 11), (3, 13))
_COMPILE_LIMIT_S = 240.0
_MIN_FREE_BYTES = 1 << 30


def check_packages() -> Iterator[Finding]:
    """Check the versions of Python and of the installed packages, and say which extras are there."""
    version = f"specdec {__version__}, Python {platform.python_version()}"
    if not _PYTHONS[0] <= sys.version_info[:2] < _PYTHONS[1]:
        yield fail("versions", f"{version} is not supported", "use Python 3.11 or 3.12")
    elif outside := list(_packages_outside_their_range()):
        yield warn("versions", f"{version}; {', '.join(outside)}", "install specdec again with its extras")
    else:
        yield ok("versions", version)
    missing = missing_modules()
    there = ", ".join(extra for extra, modules in missing.items() if not modules) or "none"
    absent = ", ".join(extra for extra, modules in missing.items() if modules) or "none"
    if "torch" in missing["serve"]:
        yield ok("extras", f"{there}, so it is no replica; not installed: {absent}")
    elif missing["serve"]:
        found = f"packages of the extra serve are missing: {', '.join(missing['serve'])}"
        yield warn("extras", found, install_command("serve"))
    else:
        yield ok("extras", f"{there}; not installed: {absent}" if any(missing.values()) else f"all: {there}")


def _packages_outside_their_range() -> Iterator[str]:
    """Yield each installed package whose version specdec does not support; none if this cannot be known."""
    try:
        from packaging.requirements import Requirement

        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except (ImportError, importlib.metadata.PackageNotFoundError):  # a client, or a checkout that is not installed
        return
    for requirement in map(Requirement, requirements):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} is not {requirement.specifier}"


def check_kernels() -> Iterator[Finding]:
    """Load the native kernels in another process, as a replica does at its start; the first time they are compiled."""
    if missing_modules()["serve"]:
        return
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "specdec.engine.kernels", "--load"],
            capture_output=True, text=True, errors="replace", timeout=_COMPILE_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        found = f"not compiled within {_COMPILE_LIMIT_S:g} s"
        yield warn("native kernels", found, "until they are, models on a CPU run slower")
        return
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
        yield warn("native kernels", reason, "install g++; without kernels, models on a CPU run slower")
    else:
        yield ok("native kernels", f"loaded in {time.monotonic() - began_s:.1f} s")


def check_cache(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the folder of compiled kernels and converted models can be written, and by this user alone."""
    folder = cache_directory(environ)
    elsewhere = "set XDG_CACHE_HOME to a folder of this user's own"
    try:
        make_folder(folder)
    except OSError as error:
        yield warn("cache folder", f"{folder}: {error.strerror or error}; each start compiles again", elsewhere)
        return
    free_bytes = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        yield warn("cache folder", f"{folder} cannot be written; each start compiles again", elsewhere)
    elif free_bytes < _MIN_FREE_BYTES:
        yield warn("cache folder", f"{folder} has {free_bytes / 1e6:.0f} MB left", "free space on its disk")
    else:
        yield ok("cache folder", f"{_short(folder)}, {free_bytes / 1e9:.0f} GB free")


def _short(path: Path) -> str:
    """Return a path with ~ for this user's home."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (RuntimeError, ValueError):
        return str(path)
