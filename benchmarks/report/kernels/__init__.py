"""Blocks that measure operations alone."""
