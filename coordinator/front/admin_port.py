"""The coordinator's second port, for operator calls: the same service behind a stricter guard."""

from __future__ import annotations

from contextlib import AsyncExitStack

from coordinator.front.servicer import CoordinatorServicer
from specdec.access.guards import Guard
from specdec.access.tls import Tls
from specdec.rpc.service_server import COORDINATOR_SERVICE, ServiceServer


async def open_admin_port(
    listen: str, servicer: CoordinatorServicer, guard: Guard, ending: AsyncExitStack, *, tls: Tls | None = None
) -> str:
    """Answer operator calls at an address; return it with the port in use.

    Args:
        listen: HOST:PORT; port 0 chooses a free port.
        servicer: answers the calls that the guard admits.
        guard: guard of the port.
        ending: closes the port.
        tls: credentials of the port; None: plaintext.

    Raises:
        Unavailable: the address cannot be bound.
    """
    server = ServiceServer(listen, service_names=(COORDINATOR_SERVICE,), check_caller=guard.check, tls=tls)
    servicer.add_to(server.grpc_server)
    await server.start()
    ending.push_async_callback(server.stop, 0.0)
    await server.set_serving()
    return server.address
