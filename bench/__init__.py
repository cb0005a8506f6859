"""Benchmarks: `python -m bench SUITE` measures against peers in the same run and prints, keeps and plots rows.

Not part of the shipped system: nothing under `specdec` or the services imports it.
"""
