"""Clients of one engine core: in this process, or in a process of its own."""
