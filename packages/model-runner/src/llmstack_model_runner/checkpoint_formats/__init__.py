"""Formats of quantized checkpoints, and their reduction to weight layouts."""
