"""Helpers of the model runner's tests: drivers, simulated devices, made-up inputs."""
