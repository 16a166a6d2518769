"""Validation of request values and of what depends on the length of a prompt."""
