"""Defines what all packages share: the values that travel, the error tree, tenants, and the interface of an engine."""
