"""Checks whether this machine can serve, each with its remedy."""
