"""Benchmarks of LLM servers over HTTP, and of llmstack offline and at start."""
