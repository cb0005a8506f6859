"""Read the metrics of a running service, as Prometheus does."""

from urllib.request import urlopen

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TIMEOUT_S = 10.0


def scrape(address: str) -> list[Sample]:
    """Return the samples of the metrics at HOST:PORT."""
    with urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as response:
        families: list[Metric] = list(text_string_to_metric_families(response.read().decode()))
    return [sample for family in families for sample in family.samples]
