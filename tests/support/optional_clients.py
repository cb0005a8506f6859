"""LiteLLM, LangChain's client of OpenAI's API and instructor, which `make test-clients` installs.

Import this module before any of them: the variables below keep them from calling services of their makers.
"""

from __future__ import annotations

import importlib.util
import os

#: Packages of `make test-clients`, as they are imported.
PACKAGES = ("instructor", "langchain_openai", "litellm")
REASON = "needs LiteLLM, langchain-openai and instructor: `make test-clients` runs this with them"

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise LiteLLM downloads a table of prices
os.environ.setdefault("LANGSMITH_TRACING", "false")


def missing_from(code: str) -> list[str]:
    """Return the optional packages that Python code imports and that are not installed."""
    return [name for name in PACKAGES if name in code and importlib.util.find_spec(name) is None]
