"""Parts that the dashboards share: the frame with its variables, and panels of lines and of single numbers.

Variables: `datasource` is a Prometheus, `cluster` and `namespace` the systems that it watches, `model_name` the models
served, `pool` the draft pools. Series without a cluster or a namespace belong to the choice of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, StackingMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableOption, VariableRefresh

#: Widths of panels; a row of the grid has 24 columns.
THIRD, HALF, QUARTER = 8, 12, 6
SECONDS, SHARE, TOKENS_PER_S, PER_S, COUNT, BYTES = "s", "percentunit", "tokens/s", "ops", "short", "bytes"

#: Selectors of a system's series, of a model's series, and of a model's series of one draft pool.
SYSTEM = 'cluster=~"$cluster", namespace=~"$namespace"'
MODEL = f'{SYSTEM}, model_name=~"$model_name"'
POOL = f'{MODEL}, pool=~"$pool"'

_LINE_HEIGHT, _STAT_HEIGHT = 8, 4
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

Query = tuple[str, str]
"""An expression, and the legend of its lines."""


def frame(name: str, title: str, description: str) -> dashboard.Dashboard:
    """Return a dashboard without panels."""
    return (
        dashboard.Dashboard(f"specdec: {title}")
        .uid(f"specdec-{name}")
        .description(description)
        .tags(["specdec"])
        .timezone("browser")
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("cluster", "Cluster", "label_values(specdec:build_info, cluster)"))
        .with_variable(
            _variable("namespace", "Namespace", 'label_values(specdec:build_info{cluster=~"$cluster"}, namespace)')
        )
        .with_variable(_variable("model_name", "Model", f"label_values(specdec:build_info{{{SYSTEM}}}, model_name)"))
        .with_variable(
            _variable("pool", "Draft pool", f"label_values(specdec:spec_decode_num_drafts_total{{{MODEL}}}, pool)")
        )
    )


def row(title: str) -> dashboard.Row:
    """Return the heading of the panels after it."""
    return dashboard.Row(title)


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = THIRD,
    stacked: bool = False,
    signed: bool = False,
) -> timeseries.Panel:
    """Return a panel of lines over time. `signed`: values may be below 0."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .span(width)
        .height(_LINE_HEIGHT)
        .fill_opacity(30 if stacked else 5)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .targets(_targets(queries))
    )
    if not signed:
        panel.min(0)
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return panel


def number(title: str, description: str, unit: str, query: str, *, width: int = QUARTER) -> stat.Panel:
    """Return a panel of the latest value."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .span(width)
        .height(_STAT_HEIGHT)
        .targets(_targets([(query, "")]))
    )


def rate(counter: str, selector: str = MODEL, *, by: str = "") -> str:
    """Return the rate of a counter, without the prefix `specdec:`, added up over all but the labels `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate(specdec:{counter}{{{selector}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, selector: str = MODEL, *, by: str = "") -> str:
    """Return a quantile of a histogram, by the labels `by`."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', selector, by=f'{by}, le' if by else 'le')})"


def quantiles(histogram: str, selector: str = MODEL) -> list[Query]:
    """Return the median, the 95th and the 99th percentile of a histogram."""
    return [(quantile(share, histogram, selector), f"p{share * 100:.0f}") for share in (0.5, 0.95, 0.99)]


def _targets(queries: Sequence[Query]) -> list[Builder[Dataquery]]:
    return [
        prometheus.Dataquery().datasource(_SOURCE).expr(expression).legend_format(legend).ref_id(chr(ord("A") + index))
        for index, (expression, legend) in enumerate(queries)
    ]


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    everything = VariableOption(selected=True, text="All", value="$__all")
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(everything)
    )
