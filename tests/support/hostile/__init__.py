"""Hostile input for every port of a system: named in one catalogue, or made at random."""
