"""Messages between processes.

Each is declared once; packing, checks and the values that fuzzers send follow from that.
"""
