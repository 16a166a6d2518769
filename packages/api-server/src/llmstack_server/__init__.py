"""An OpenAI-compatible HTTP server over llmstack: completions, chat, streaming, metrics."""
