"""A small vision-language model of drawings, as a folder in Hugging Face form."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MODEL_NAME", "model_path"]

MODEL_NAME = "llmstack-demo-vision"


def model_path() -> Path:
    """Return the folder that holds the model's config, weights, tokenizer and image processor."""
    return Path(__file__).resolve().parent / "model"
