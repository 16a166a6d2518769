"""State of a server that all routes share."""
