"""Settings of traces and metrics over OTLP, for the services that send them: the coordinator and the gateway."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _checked_otlp_url(url: str) -> str:
    parts = urlsplit(url)
    if url and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError(f"must be http://HOST:PORT or https://HOST:PORT, not {url!r}")
    return url


OptionalOtlpUrl = Annotated[str, AfterValidator(_checked_otlp_url)]
"""http://HOST:PORT or https://HOST:PORT, or "" if unset."""


class TracingSettings(BaseModel):
    """Flags of a service that records traces."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    otlp_endpoint: OptionalOtlpUrl = ""
    """OpenTelemetry collector that gets a trace of each request, over OTLP (gRPC, usually port 4317). https:// encrypts
    the connection. Needs the extra otel. Unset: OTEL_EXPORTER_OTLP_ENDPOINT; without both, no traces."""

    trace_share: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of requests whose trace is recorded, 0 to 1. A request that comes with a trace context (`traceparent`) is
    recorded if its caller records it."""
