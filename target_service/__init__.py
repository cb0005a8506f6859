"""The target service: verifies candidate tokens in one forward pass. Runs as `python -m target_service`."""
