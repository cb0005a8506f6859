"""Rule of an API key, which clients and services share: what one of them sends, the other one accepts."""

from __future__ import annotations

import re
from typing import Any

#: What an API key is, for errors, which never show a key.
API_KEY_RULE = "must be 1 to 4096 printable ASCII characters without spaces"

# Such characters are transmitted unchanged everywhere.
_API_KEY = re.compile(r"[!-~]{1,4096}")


def is_api_key(key: Any) -> bool:
    """Return whether a value can be an API key."""
    return isinstance(key, str) and _API_KEY.fullmatch(key) is not None
