"""Helpers of the kernels' tests: inputs of the sampling kernels."""
