"""Llama-shaped models on a CPU, run by compiled C++ kernels."""
