"""Sizes a deployment from a load, model shapes and a card: `specdec plan`.

`cards` has the limits of GPUs, `cards` what a step takes on one, `deployment` searches for the fewest GPUs
that hold the latencies, and `plan` writes the numbers for `kubectl apply -k`. Everything here is calculated; nothing
is measured.
"""
