"""Pooling APIs: embeddings, classification, scores and raw numbers."""
