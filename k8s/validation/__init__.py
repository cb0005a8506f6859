"""Checks of the manifests, of the compose file, and of the rules that read metrics. Needs no cluster.

`checks` runs everything; each other module has one subject and returns `documents.Problem`s. What is wrong is named by
file, object and field. It is not shown that images exist or that pods start.
"""
