"""`python -m gateway`: reads the settings, builds the gateway, and serves until SIGTERM or Ctrl-C.

This is the only module of the gateway that reads the environment and handles signals.
"""

from __future__ import annotations

if __name__ == "__main__":  # loading what follows takes a second, and a model longer
    from specdec.settings.early_signals import end_on_sigterm
    from specdec.settings.standard_streams import never_wait_for_readers

    end_on_sigterm()
    never_wait_for_readers()

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from gateway.app import build_app
from gateway.auth import ApiKeys
from gateway.context import Gateway
from gateway.http_server import bind, serve
from gateway.metrics import GatewayMetrics
from gateway.upstream import Upstream
from specdec.access.callers import open_tokens
from specdec.access.service_key import ServiceKey, read_service_key
from specdec.contract.errors import InvalidSetting, SpecdecError, Unavailable, error_line
from specdec.observability.logging import configure_logging
from specdec.observability.metrics_server import start_metrics_server
from specdec.observability.tracing import open_tracing
from specdec.settings.addresses import guarded_address
from specdec.settings.gateway import GatewaySettings
from specdec.settings.reading import opened, parse_settings
from specdec.state.connection import RedisConnection
from specdec.state.shared_quotas import SharedQuotas
from specdec.state.store_wait import store_answers, wait_for_store
from specdec.state.stored_responses import RedisResponses

#: Name of this service in traces and metrics over OTLP.
_OTEL_SERVICE = "specdec-gateway"

#: Time after which the requests of a gateway that died no longer count.
_QUOTA_LEASE_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; return the exit code."""
    settings = parse_settings(GatewaySettings, prog="python -m gateway", argv=sys.argv[1:] if argv is None else argv)
    configure_logging(settings.log_format, settings.log_level, service="gateway")
    try:
        keys = opened(lambda: _open_keys(settings))
        service_key = opened(lambda: read_service_key(settings.service_key, os.environ))
        asyncio.run(_serve(settings, keys, service_key))
    except SpecdecError as error:
        print(error_line(error), file=sys.stderr)
        return 2 if isinstance(error, InvalidSetting) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def _open_keys(settings: GatewaySettings) -> ApiKeys:
    """Raises InvalidRequest and Unavailable as `open_tokens` and `ApiKeys`."""
    has_keys = bool(settings.api_keys or settings.api_key or settings.jwt_jwks)
    return ApiKeys(
        settings.api_keys,
        key=settings.api_key,
        tokens=open_tokens(settings),
        allow_anonymous=settings.allow_anonymous or not has_keys,
    )


async def _serve(settings: GatewaySettings, keys: ApiKeys, service_key: ServiceKey | None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises SpecdecError if an address cannot be used."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics = GatewayMetrics()
    tracing = open_tracing(settings.otlp_endpoint, settings.trace_share, service=_OTEL_SERVICE, environ=os.environ)
    async with AsyncExitStack() as ending:
        if tracing is not None:
            ending.push_async_callback(asyncio.to_thread, tracing.close)
        if settings.metrics:
            ending.callback(start_metrics_server(metrics.registry, *guarded_address(settings.metrics)))
        if not settings.coordinator:
            with contextlib.suppress(Unavailable):  # it may be late; a wrong one is refused before anything listens
                await wait_for_store(settings.redis_url, 0.0)
        upstream = Upstream(settings, service_key)
        ending.push_async_callback(upstream.close)
        await upstream.start()
        responses = RedisResponses(settings.redis_url, cluster=settings.cluster)
        ending.push_async_callback(responses.close)
        _share_limits(settings, keys, ending)
        listener = ending.enter_context(bind(settings.listen))
        gateway = Gateway(settings, upstream, keys, metrics, responses, tracing)
        await _run_all(
            stop,
            serve(build_app(gateway), listener, settings, stop),
            _require_store(settings, stop),  # beside it: `/health` is answered while the store is late
        )


def _share_limits(settings: GatewaySettings, keys: ApiKeys, ending: AsyncExitStack) -> None:
    """Count the limits of keys with the other gateways on the same Redis; one with `memory://` counts alone."""
    if settings.redis_url.startswith("memory:"):
        return
    connection = RedisConnection(settings.redis_url)
    ending.push_async_callback(connection.close)
    process = f"g-{secrets.token_hex(6)}"
    quotas = SharedQuotas(connection, process, lease_ttl_s=_QUOTA_LEASE_S, cluster=settings.cluster)
    ending.push_async_callback(quotas.close)
    keys.count_with(quotas)


async def _require_store(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Wait for the store that coordinators are looked up in. Raises as `store_answers`."""
    if not settings.coordinator:
        await store_answers(settings.redis_url, settings.store_wait_s, stop)


async def _run_all(stop: asyncio.Event, *parts: Coroutine[Any, Any, None]) -> None:
    """Run parts that end on `stop`; one that fails sets it. Raises the first part's error, in the order of `parts`."""
    tasks = [asyncio.create_task(part) for part in parts]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    stop.set()
    await asyncio.wait(tasks)
    for task in tasks:
        task.result()


if __name__ == "__main__":
    sys.exit(main())
