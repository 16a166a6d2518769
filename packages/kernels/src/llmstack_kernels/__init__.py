"""Attention, normalisation, rotary and sampling operations with a reference, a CPU and a Triton implementation each."""
