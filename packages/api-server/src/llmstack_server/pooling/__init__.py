"""The routes of prompts that are pooled: embeddings, labels, scores, and the raw numbers."""
