"""Compilation of the Triton kernels for GPUs that are absent, with a report."""
