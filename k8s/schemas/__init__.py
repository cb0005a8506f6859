"""JSON schemas of custom resources; `python -m k8s.schemas CRD.yaml [VERSION]` writes one from its operator's CRD."""
