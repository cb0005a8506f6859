"""Plugin of pytest-xdist for `--dist loadfile`: files that share a system of the session run in one worker.

Each worker would start a system of its own otherwise: four services, ten seconds of a processor.
"""

from __future__ import annotations

from typing import Any

import pytest

#: Files of tests by the fixture that they share.
SHARING = {
    "system": ("test_anthropic_client", "test_langchain_client", "test_litellm_client", "test_openai_client",
               "test_openai_responses", "test_pydantic_ai_client"),
    "demo": ("test_documented_code", "test_examples", "test_instructor_client", "test_openai_forms", "test_playground",
             "test_playground_chat", "test_structured_output", "test_talk", "test_tmux"),
    "tool_url": ("test_chat_tools", "test_openai_agents_client", "test_playground_forms", "test_tools_over_http"),
}  # fmt: skip
_SYSTEMS = {f"tests/e2e/{name}.py": system for system, names in SHARING.items() for name in names}


def scope_of(test: str) -> str:
    """Return what tests of one worker have in common: a shared system, or else their file."""
    path = test.partition("::")[0]
    return _SYSTEMS.get(path, path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Scheduling(config, log)
