"""Dashboards for Grafana, and rules for Prometheus: `python -m monitoring` writes `monitoring/grafana/*.json`.

`prometheus/` holds the rules, which are written by hand. Series are those of docs/reference/metrics.md.
"""
