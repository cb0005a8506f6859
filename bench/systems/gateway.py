"""The HTTP gateway in a child process, in front of a system that runs already. The suite `gateway` uses it."""

import asyncio
import sys

from bench.harness.http_stream import get_status
from bench.systems.http_servers import free_port
from bench.systems.process import ServerProcess
from specdec.supervision.service_process import SERVICE_ENVIRONMENT

_POLL_S = 0.05


class GatewayServer(ServerProcess):
    """`python -m gateway` in the environment that `specdec up` gives it.

    It is ready once it reaches a target through its coordinator.
    """

    def __init__(self, coordinator: str) -> None:
        """Describe the gateway of the coordinator at HOST:PORT."""
        self.port = free_port()
        address = f"127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "gateway", "--listen", address, "--coordinator", coordinator]
        super().__init__("gateway", [*command, "--redis-url", "memory://"], SERVICE_ENVIRONMENT)

    async def _wait_until_ready(self) -> None:
        while not await self._is_ready():  # noqa: ASYNC110 (another process sets no event of ours)
            await asyncio.sleep(_POLL_S)

    async def _is_ready(self) -> bool:
        try:
            return await get_status(self.port, "/ready") == 200
        except (OSError, asyncio.IncompleteReadError):
            return False
