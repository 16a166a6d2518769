"""HTTP APIs for clients, one folder each; none imports another."""
