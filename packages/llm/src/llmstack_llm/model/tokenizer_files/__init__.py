"""Conversion of other tokenizers to `tokenizer.json`, in a child process."""

from llmstack_llm.model.tokenizer_files.cache import converted_folder

__all__ = ["converted_folder"]
