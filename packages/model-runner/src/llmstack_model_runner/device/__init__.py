"""Devices: checks at the start, limits of the host, streams, graphs and errors."""
