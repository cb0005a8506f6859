"""Simulates the autoscalers of the manifests on request traces: suite `autoscaling`.

`traces` makes arrivals, `pools` serves them with the step times of `specdec plan`, and `scraped` keeps what Prometheus
would have scraped. `manifests` reads the autoscalers from k8s/components, `queries` evaluates their queries, and
`scaling_rule` and `keda` decide. `cluster` runs these together, `outcomes` compares a run with the plan, `sizing`
compares a plan with the smallest system that holds, `limits` calculates what breaks at large loads, and `suite` makes
rows of it all.
"""
