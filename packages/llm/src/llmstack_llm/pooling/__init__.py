"""Requests that return vectors, labels or scores."""
