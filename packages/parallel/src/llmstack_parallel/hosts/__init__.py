"""Ranks of one model on several nodes; the others join node 0."""
