"""Clients of other makers, which `make test-clients` installs.

Import this module before any of them: the variables below keep them from calling services of their makers.
"""

from __future__ import annotations

import importlib.util
import os
import re

#: Packages of `make test-clients`, as they are imported.
PACKAGES = ("agents", "instructor", "langchain_openai", "litellm", "pydantic_ai")
REASON = "needs packages of other makers: `make test-clients` runs this with them"

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise LiteLLM downloads a table of prices
os.environ.setdefault("LANGSMITH_TRACING", "false")
os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "true")


def missing_from(code: str) -> list[str]:
    """Return the optional packages that Python code imports and that are not installed."""
    imported = set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))
    return [name for name in PACKAGES if name in imported and importlib.util.find_spec(name) is None]
