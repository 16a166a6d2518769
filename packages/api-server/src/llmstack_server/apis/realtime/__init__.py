"""Transcripts of sound that still comes, in OpenAI's form and in vLLM's."""
