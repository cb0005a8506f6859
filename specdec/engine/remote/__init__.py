"""Engines that run in servers of their own: HTTP connections, the identity of their models, and completions.

Target and draft replicas in front of such servers share this package.
"""
