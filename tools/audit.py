"""Audit installed packages for known vulnerabilities with pip-audit: what `make audit` runs.

pip-audit ends with code 0 for a package that its service does not know, so a service that answers nothing would pass.
Here a package that could not be audited fails the audit, unless it is a local build such as torch 2.13.0+cpu: those are
in no service, and are listed.

    python -m tools.audit PIP_AUDIT SITE_PACKAGES
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.contract.version import DISTRIBUTION

_MAX_NAMED = 5


def main(pip_audit: str, folder: str) -> int:
    """Return 0 if every package was audited and none has a known vulnerability."""
    command = [pip_audit, "--path", folder, "--format", "json", "--skip-editable", "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"error: nothing was audited, the vulnerability service cannot be reached: {reason}", file=sys.stderr)
        return 1
    # No service knows the distribution of this repository before it is published.
    return report([each for each in packages if each["name"] != DISTRIBUTION])


def report(packages: Sequence[Mapping[str, Any]]) -> int:
    """Print the outcome of packages in pip-audit's JSON, and return the exit code."""
    vulnerable = [each for each in packages if each.get("vulns")]
    skipped = [each for each in packages if "skip_reason" in each]
    unaudited = [each for each in skipped if "+" not in each.get("version", each["skip_reason"])]
    for each in vulnerable:
        for found in each["vulns"]:
            fixed = ", ".join(found["fix_versions"]) or "no version"
            print(f"{each['name']} {each['version']}: {found['id']}, fixed in {fixed}")
    print(f"{len(packages) - len(skipped)} of {len(packages)} packages audited, {len(vulnerable)} vulnerable")
    if local := [each["name"] for each in skipped if each not in unaudited]:
        print(f"local builds, not audited: {', '.join(local)}")
    if unaudited:
        names = ", ".join(each["name"] for each in unaudited[:_MAX_NAMED])
        more = ", ..." if len(unaudited) > _MAX_NAMED else ""
        found = (
            f"{len(unaudited)} of {len(packages)} packages are not known to the service, or to the mirror in its place"
        )
        print(f"error: not audited: {names}{more}; {found}", file=sys.stderr)
    return 1 if vulnerable or unaudited else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
