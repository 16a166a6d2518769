"""Compiles kernels for GPUs that are not there, and says what the compiler made of them."""
