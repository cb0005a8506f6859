"""The metrics server: names as they are, whatever format the scraper prefers."""

from __future__ import annotations

from urllib.request import Request, urlopen

import pytest

from specdec.observability.series import ServiceSeries
from tests.support.scraping import served


@pytest.mark.parametrize("accept", [
    "*/*", "text/plain",
    "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3",
])  # fmt: skip
def test_names_keep_their_colon_in_every_format_that_prometheus_accepts(accept: str) -> None:
    series = ServiceSeries({"model_name": "m"})
    series.counter("turns", "Turns.").inc()
    with (
        served(series.registry) as endpoint,
        urlopen(Request(f"http://{endpoint.address}/metrics", headers={"Accept": accept}), timeout=60) as answer,
    ):
        assert '\nspecdec:turns_total{model_name="m"} 1.0\n' in answer.read().decode()
