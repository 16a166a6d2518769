"""Benchmarks of LLM servers and of llmstack itself: load over plain OpenAI HTTP, offline runs, cold starts."""
