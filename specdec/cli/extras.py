"""Says which extra to install when a command needs a package that a client-only install lacks."""

from __future__ import annotations

import importlib.util

from specdec.contract.errors import Unsupported
from specdec.contract.version import install_command

#: Top-level modules that the gateway needs beside those of `specdec up`.
GATEWAY_MODULES = ("fastapi", "uvicorn", "httptools")

#: Top-level modules of each extra of pyproject.toml.
_MODULES = {
    "serve": (
        "grpc_reflection", "huggingface_hub", "jinja2", "numpy", "prometheus_client", "pydantic", "pydantic_settings",
        "redis", "safetensors", "tokenizers", "torch", "transformers",
    ),
    "embedded": ("fakeredis",),
    "gateway": GATEWAY_MODULES,
    "gguf": ("accelerate", "gguf"),
    "ray": ("ray",),
    "otel": ("opentelemetry",),
}  # fmt: skip


def missing_extra(error: ModuleNotFoundError, command: str) -> Unsupported:
    """Return the error to print for a command that failed to import a module.

    Raises:
        ModuleNotFoundError: the module belongs to no extra, so its absence is a fault of the installation.
    """
    package = (error.name or "").partition(".")[0]
    for extra, modules in _MODULES.items():
        if package in modules:
            return Unsupported(
                f"specdec {command} needs the package {package}, which is not installed: run {install_command(extra)}"
            )
    raise error


def missing_modules() -> dict[str, tuple[str, ...]]:
    """Return the modules of each extra that are not installed. Imports none of them."""
    return {
        extra: tuple(name for name in modules if importlib.util.find_spec(name) is None)
        for extra, modules in _MODULES.items()
    }


def require_modules(names: tuple[str, ...]) -> None:
    """Raises ModuleNotFoundError for the first module that is not installed. Imports none of them."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
