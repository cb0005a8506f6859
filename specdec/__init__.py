"""Distributed speculative decoding: the library that the services, the SDK and the command line share.

The clients of the SDK are loaded at their first use, so that importing a service's module does not load them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.contract.version import __version__

if TYPE_CHECKING:
    from specdec.client import AsyncClient, Client, Tls
    from specdec.contract.constraint import Constraint

__all__ = ["AsyncClient", "Client", "Constraint", "Tls", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in ("AsyncClient", "Client", "Constraint", "Tls"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specdec import client

    return getattr(client, name)
