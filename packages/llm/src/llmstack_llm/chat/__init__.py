"""Rendering of conversations with chat templates."""
