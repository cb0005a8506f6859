"""Dashboards for Grafana, and rules for Prometheus: `python -m monitoring` writes `monitoring/grafana/*.json`.

`prometheus/` holds the rules, which are written by hand; `rules` writes them as objects of Kubernetes. Series are those
of docs/reference/metrics.md.
"""
