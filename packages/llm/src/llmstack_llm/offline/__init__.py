"""Offline use: `LLM` and the engine behind it."""
