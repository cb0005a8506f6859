"""Llama-shaped models on a CPU, run by kernels of our own."""
