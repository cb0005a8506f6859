"""Read the metrics of a running service, as Prometheus does."""

from urllib.request import ProxyHandler, build_opener

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TIMEOUT_S = 10.0


def page_of(address: str) -> str:
    """Return the metrics at HOST:PORT as text. No proxy of the environment is asked."""
    with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=_TIMEOUT_S) as response:
        text: str = response.read().decode()
    return text


def scrape(address: str) -> list[Sample]:
    """Return the samples of the metrics at HOST:PORT."""
    families: list[Metric] = list(text_string_to_metric_families(page_of(address)))
    return [sample for family in families for sample in family.samples]


def total(address: str, name: str, **labels: str) -> float:
    """Return the sum of the series of a metric at HOST:PORT that have these labels."""
    return sum(
        sample.value for sample in scrape(address) if sample.name == name and labels.items() <= sample.labels.items()
    )
