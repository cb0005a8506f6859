"""The checks of `specdec doctor`, one subject a file. `specdec.cli.doctor` runs and prints them.

A check yields findings and connects by the code that the other commands and the services use. Packages that a
client-only install lacks are imported in the functions that need them.
"""
