"""Client of a running server: `llmstack chat` and `llmstack complete`."""
