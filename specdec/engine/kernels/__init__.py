"""C++ kernels for CPUs: found prebuilt or compiled on the machine that runs them, and loaded."""
