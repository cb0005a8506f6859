"""Parts that traces and metrics over OTLP share: the collector's address, the resource, the error without packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from specdec.contract.errors import Unsupported

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource


#: Channel arguments of exporters: a collector is reached directly, also if http_proxy is set in the environment.
NO_PROXY: tuple[Any] = (("grpc.enable_http_proxy", 0),)


def otlp_endpoint(endpoint: str, signal: Literal["TRACES", "METRICS"], environ: Mapping[str, str]) -> str:
    """Return the URL of the collector: `endpoint`, or that of OpenTelemetry's own variables; "" where nothing is sent.

    Args:
        endpoint: URL in the settings (`--otlp-endpoint`), or "".
        signal: kind of what is sent, as in the names of the variables.
        environ: environment.
    """
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    names = (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return endpoint or next((environ[name] for name in names if environ.get(name)), "")


def process_resource() -> Resource:
    """Return the resource that OpenTelemetry's variables and plugins describe, without the name of the service.

    It takes too long for an event loop that serves.
    """
    from opentelemetry.sdk.resources import Resource

    return Resource.create()


def of_service(resource: Resource, service: str) -> Resource:
    """Return a resource with this `service.name`."""
    from opentelemetry.sdk.resources import Resource

    return resource.merge(Resource({"service.name": service}))


def missing_package(error: ModuleNotFoundError, field: str) -> Unsupported:
    """Return the error of a setting that needs the packages of the extra `otel`."""
    return Unsupported(f'{field}: package {error.name} is not installed: run pip install "specdec[otel]"', field=field)
