"""Several models in one server: which are in memory, and which one answers."""
