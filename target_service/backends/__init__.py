"""Backends of the target service: other engines that verify draft tokens, behind the same contract on the wire."""
