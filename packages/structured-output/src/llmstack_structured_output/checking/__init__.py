"""Compiling constraints before admission: in processes, within limits, fairly."""
