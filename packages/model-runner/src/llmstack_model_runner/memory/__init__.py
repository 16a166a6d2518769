"""Memory of the KV cache: data type, size, and copies of blocks."""
