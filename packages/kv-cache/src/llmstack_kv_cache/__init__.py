"""A paged KV cache with prefix caching: blocks, hits, eviction and accounting, usable inside any engine."""
