"""Processes, sockets and signals of a server, from its start to its end."""
