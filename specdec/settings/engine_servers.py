"""Settings of replicas whose model may run in another engine, a server in most cases."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from pydantic import Field

from specdec.settings.shared import DAY_S, ReplicaSettings

OWN = "own"
"""Value of --backend for a model that runs in this process, in our own engine."""


class EngineServerSettings(ReplicaSettings):
    """Flags that name the server of --backend."""

    backend_url: str = ""
    """Base URL of the server of --backend: http://HOST:PORT or https://HOST:PORT."""

    backend_key: str = ""
    """Key of the API of the server of --backend: a file, or env:NAME for an environment variable. Unset: none."""

    backend_ca: str = ""
    """File with the certificates that sign the certificate of the server of --backend. Unset: the system's."""

    backend_model: str = ""
    """Name by which the server of --backend knows the model. Unset: the first model that it lists."""

    backend_timeout_s: float = Field(default=60.0, gt=0.0, le=DAY_S)
    """Time after which a question to the server of --backend fails, in seconds; another replica is then asked."""

    def _check_engine(self, backend: str, servers: Collection[str], own: Mapping[str, bool]) -> None:
        """Check the flags of an engine together.

        Args:
            backend: value of --backend.
            servers: the values that need a server.
            own: flags of the service that our own engine alone takes, and whether each is set.

        Raises:
            ValueError: they contradict each other.
        """
        if backend not in servers and self.backend_url:
            raise ValueError(f"--backend-url needs --backend {' or '.join(servers)} beside it")
        if backend == OWN:
            return
        if backend in servers and not re.fullmatch(r"https?://[^/\s@?#]+(/[^\s@?#]*)?", self.backend_url):
            raise ValueError(f"--backend {backend} needs --backend-url http://HOST:PORT without a user or a query")
        ours = {
            **own,
            "--tensor-parallel": self.tensor_parallel > 1,
            "--kv-tier-url": bool(self.kv_tier_url),
            "--kv-cache-bytes": self.kv_cache_bytes is not None,
        }
        for flag, is_set in ours.items():
            if is_set:
                raise ValueError(f"{flag} does not go with --backend {backend}: its model runs in another engine")
