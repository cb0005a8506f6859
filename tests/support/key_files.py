"""Key files of tests, readable by their user alone, as the services want them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def key_line(key: str, rest: str) -> str:
    """Return the line of a key; `rest`: its tenant, rights and limits."""
    return f"{hashlib.sha256(key.encode()).hexdigest()} {rest}\n"


def lines_of(*tenants: str) -> str:
    """Return a line for each tenant, whose key is its name and may generate."""
    return "".join(key_line(tenant, f"{tenant} generate") for tenant in tenants)


def write_private(path: Path, text: str) -> Path:
    """Replace the file, as editors and Kubernetes do, with mode 600; return its path."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.chmod(0o600)
    os.replace(new, path)
    return path
