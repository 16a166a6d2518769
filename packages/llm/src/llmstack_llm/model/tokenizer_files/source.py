"""Source files of converted tokenizers in a model's folder."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from llmstack_model_files import artifact_path, open_artifact, read_json
from llmstack_types import LLMStackError

MAX_FILE_BYTES = 64 << 20
MAX_TOKENS = 1 << 20
MAX_TOKEN_BYTES = 1024
"""Splits of a longer token are not searched: their number, times its length, is work that a file could demand."""

CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
TEKKEN = "tekken.json"
_OURS = ("tokenizer.json", "vocab.txt")
_TIKTOKEN_FILES = ("qwen.tiktoken", "tiktoken.model")


class ConversionError(LLMStackError, ValueError):
    """The tokenizer cannot be converted; the text says why in one sentence."""


class Format(StrEnum):
    """A format of a tokenizer's file."""

    SENTENCEPIECE = "sentencepiece"
    TIKTOKEN = "tiktoken"
    TEKKEN = "tekken"


def find_source(folder: Path) -> tuple[Format, str] | None:
    """Format and name of the file to convert; None where the folder needs no conversion or has nothing to convert."""
    if any((folder / name).is_file() for name in _OURS):
        return None
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return None
    if artifact_path(folder, TEKKEN) is not None:
        return Format.TEKKEN, TEKKEN
    for name in _TIKTOKEN_FILES:
        if artifact_path(folder, name) is not None:
            return Format.TIKTOKEN, name
    if artifact_path(folder, "tokenizer.model") is None:
        others = sorted(path.name for path in folder.glob("*.tiktoken"))
        return (Format.TIKTOKEN, others[0]) if others else None
    with open_artifact(folder, "tokenizer.model") as file:
        start = file.read(64)
    # A ModelProto begins with the mark of its first piece, which no line of base64 begins with.
    is_proto = start[:1] == b"\n"
    return (Format.SENTENCEPIECE if is_proto else Format.TIKTOKEN), "tokenizer.model"


def mistral_source(folder: Path) -> tuple[Format, str]:
    """Mistral's own tokenizer, whatever else is beside it.

    Raises:
        ConversionError: There is none.
    """
    if artifact_path(folder, TEKKEN) is None:
        raise ConversionError(
            f"--tokenizer-mode mistral: {folder.name} has no {TEKKEN}; leave the flag out, and the tokenizer that is "
            "there is read"
        )
    return Format.TEKKEN, TEKKEN


def has_template(folder: Path) -> bool:
    """Whether a folder has a chat template of its own."""
    if any(artifact_path(folder, name) is not None for name in TEMPLATE_FILES):
        return True
    return bool((read_json(folder, "tokenizer_config.json", required=False) or {}).get("chat_template"))


def read_source(folder: Path, name: str) -> bytes:
    """The content of a file.

    Raises:
        ConversionError: It is too large.
    """
    with open_artifact(folder, name) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConversionError(f"{name} is larger than {MAX_FILE_BYTES >> 20} MiB")
    return content


def read_configuration(folder: Path) -> dict[str, object]:
    """`tokenizer_config.json`, with the tokens that only `special_tokens_map.json` names."""
    named = read_json(folder, "special_tokens_map.json", required=False) or {}
    return named | (read_json(folder, "tokenizer_config.json", required=False) or {})


def read_model(folder: Path) -> tuple[str, int | None]:
    """Type of the model and width of its logits, which a tokenizer without a description is compared with."""
    config = read_json(folder, "config.json", required=False) or {}
    text_config = config.get("text_config")
    sizes = [found.get("vocab_size") for found in (config, text_config) if isinstance(found, dict)]
    size = next((size for size in sizes if type(size) is int), None)
    return str(config.get("model_type", ""))[:64], size
