"""Decoding and preprocessing in child processes, within a time and a memory."""
