"""Talking to a running server from the terminal: `llmstack chat` and `llmstack complete`."""
