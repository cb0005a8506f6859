"""Logs and metrics of the services."""
