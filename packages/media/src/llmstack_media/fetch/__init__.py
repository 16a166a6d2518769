"""Bytes of media from what a request names: `data:`, `http(s):` and `file:`."""
