"""Manifests of specdec for Kubernetes, and the program that checks them: `python -m k8s.validate`."""
