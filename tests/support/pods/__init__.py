"""Rendered manifests as real containers, under probes and rolled as a cluster would: `make test-pods`."""
