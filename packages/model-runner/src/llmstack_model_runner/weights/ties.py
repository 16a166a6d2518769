"""Output heads that a configuration ties to the embedding."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from llmstack_kernels.linear import bits_per_weight
from llmstack_model_files import (
    check_safetensors,
    gguf_weights,
    may_have_tensor,
    read_model_config,
    safetensors_files,
)
from llmstack_model_runner.architectures import ARCHITECTURES
from llmstack_model_runner.checkpoint_formats.config import (
    CheckpointFormat,
    choose_quantization,
    gguf_activations_of,
)
from llmstack_model_runner.models.image_files import with_generation_file, with_image_files
from llmstack_types import ModelRunnerConfig

logger = logging.getLogger(__name__)

_HEADS = ("lm_head.weight", "embed_out.weight")
_TABLES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_ROWS_AT_ONCE = 4096


def read_served_config(
    config: ModelRunnerConfig,
) -> tuple[Mapping[str, Any], CheckpointFormat | None, str | None]:
    """The model's configuration without a tie that its weights contradict, their format, and how they are rounded.

    Raises:
        llmstack_model_files.ModelFilesError: A file is missing or damaged.
        ValueError: The format or the rounding is unknown; no weights have been read.
    """
    folder = Path(config.model_path)
    found: Mapping[str, Any] = read_model_config(folder, json.loads(config.hf_overrides or "{}"))
    files = gguf_weights(folder)
    activations = gguf_activations_of(config.gguf_activations, config.quantization, files)
    checkpoint_format, scheme = choose_quantization(found, config.quantization, activations)
    if scheme is not None:
        bits_per_weight(scheme)  # refuses a name that it does not know
    is_native = any(name in ARCHITECTURES for name in (found.get("architectures") or [])[:1])
    if is_native and config.load_format != "dummy" and not files:
        found = untied_if_different(found, Path(config.weights_folder))
    found = with_generation_file(found, folder)
    found = with_image_files(
        found, folder, is_text_only=config.language_model_only, is_native_only=config.model_impl == "llmstack"
    )
    return found, checkpoint_format, scheme


def untied_if_different(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The configuration, with `tie_word_embeddings` false if the folder has a head with other values.

    transformers decides so too; classes with parts for images tie by default, and many such checkpoints have a head.

    Raises:
        llmstack_model_files.ModelFilesError: There are no weights, or a file is damaged.
    """
    if config.get("tie_word_embeddings") is False:
        return config
    # Most have no head, and of the others two files matter: decoding each header twice would cost a second per 100,000
    # tensors.
    files = safetensors_files(folder)
    if not any(may_have_tensor(path, _HEADS) for path in files):
        return config
    files = [path for path in files if may_have_tensor(path, (*_HEADS, *_TABLES))]
    places = {name: path for path in files for name in check_safetensors(path)}
    head, table = (next((name for name in places if name.endswith(names)), None) for names in (_HEADS, _TABLES))
    if head is None or table is None or _are_equal(places[head], head, places[table], table):
        return config
    if config.get("tie_word_embeddings"):
        logger.warning("%s differs from the embedding, so it is used, although config.json ties them", head[:128])
    return {**config, "tie_word_embeddings": False}


def _are_equal(path: Path, name: str, other_path: Path, other_name: str) -> bool:
    """Whether two tensors have the same rows; they are read in parts, since most differ in the first."""
    with ExitStack() as stack:
        try:
            first, second = (
                stack.enter_context(safe_open(file, framework="pt")).get_slice(tensor)
                for file, tensor in ((path, name), (other_path, other_name))
            )
        except SafetensorError as error:
            raise ValueError(f"{path.name} cannot be read as safetensors.") from error
        shape = first.get_shape()
        if (shape, first.get_dtype()) != (second.get_shape(), second.get_dtype()) or len(shape) != 2:
            return False
        rows = range(0, shape[0], _ROWS_AT_ONCE)
        return all(torch.equal(first[row : row + _ROWS_AT_ONCE], second[row : row + _ROWS_AT_ONCE]) for row in rows)
