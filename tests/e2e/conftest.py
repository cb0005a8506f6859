"""Checkpoints, a system with a gateway and a Redis that several end-to-end tests share, built once a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gateway_system import claude, client, demo, greedy, sdk, system
from tests.support.redis_fixture import redis_server, redis_url
from tests.support.tiny_models import build_tiny_model, build_tiny_pair
from tests.support.tool_system import tool_claude, tool_client, tool_url

__all__ = [
    "claude",
    "client",
    "demo",
    "greedy",
    "llama_pair",
    "other_draft",
    "redis_server",
    "redis_url",
    "sdk",
    "system",
    "tool_claude",
    "tool_client",
    "tool_url",
]


@pytest.fixture(scope="session")
def llama_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and its perturbed copy."""
    return build_tiny_pair("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def other_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A worse draft for the same target: the same model, perturbed twice as much."""
    return build_tiny_model("llama", tmp_path_factory.mktemp("other"), perturb=0.05)
