"""The sources of the last release, from the repository's history, to run beside today's (`tests.support.services`).

The last release is the newest tag `v*`, or in a clone without tags the newest commit `Release X.Y.Z`.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.services import ROOT

_PACKAGES = ("specdec", "coordinator", "draft_service", "target_service", "gateway")
_NEWEST_TAG = ("describe", "--tags", "--abbrev=0", "--match", "v*")
_NEWEST_RELEASE = ("log", "-1", "--format=%H", "--extended-regexp", "--grep=^Release [0-9]+[.][0-9]+[.][0-9]+$")


def last_release() -> str:
    """Return the tag or commit of the last release; skip the test in a clone without history."""
    for command in (_NEWEST_TAG, _NEWEST_RELEASE):
        found = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        if found.returncode == 0 and found.stdout.strip():
            return found.stdout.strip()
    pytest.skip("this clone has neither a tag nor the commit of a release")


def unpack(release: str, folder: Path) -> Path:
    """Write the sources of a release into a folder, and return it."""
    archive = subprocess.run(["git", "archive", release, *_PACKAGES], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder
