"""The demo model: a small GPT-2 storyteller as a folder in Hugging Face form."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MODEL_NAME", "model_path"]

MODEL_NAME = "llmstack-demo"


def model_path() -> Path:
    """Return the folder that holds the model's config, weights and tokenizer."""
    return Path(__file__).resolve().parent / "model"
