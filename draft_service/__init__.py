"""The draft service: proposes candidate tokens for sessions. Runs as `python -m draft_service`."""
