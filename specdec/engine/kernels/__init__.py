"""Kernels of our own for CPUs, in C++: found, compiled on the machine that runs them, and loaded."""
