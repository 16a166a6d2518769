"""State, output and statistics of requests in flight."""
