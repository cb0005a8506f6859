"""Kernels of our own for Llama-shaped models on a CPU, compiled on the machine that runs them."""
