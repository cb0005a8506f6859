"""`make audit` passes only if every package was looked up and none has a known vulnerability."""

from __future__ import annotations

from typing import Any

import pytest

from tools.audit import report

SOUND: dict[str, Any] = {"name": "sound", "version": "1.0", "vulns": []}
BAD: dict[str, Any] = {"name": "bad", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
UNKNOWN = {"name": "unknown", "skip_reason": "Dependency not found on PyPI and could not be audited: unknown (1.0)"}
LOCAL = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0+cpu)"}


@pytest.mark.parametrize(
    ("packages", "code"),
    [([SOUND], 0), ([SOUND, LOCAL], 0), ([SOUND, BAD], 1), ([SOUND, UNKNOWN], 1), ([UNKNOWN], 1)],
)
def test_a_vulnerable_package_and_one_that_is_not_known_to_the_service_fail(
    packages: list[dict[str, Any]], code: int
) -> None:
    assert report(packages) == code
