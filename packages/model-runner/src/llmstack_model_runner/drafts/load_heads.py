"""Loading of draft heads that have a checkpoint of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from llmstack_model_files import check_safetensors, safetensors_files
from llmstack_model_runner.drafts.by_block import DraftsByBlock
from llmstack_model_runner.drafts.by_head import DraftsByHead
from llmstack_model_runner.drafts.by_medusa import DraftsByMedusa
from llmstack_model_runner.drafts.guesser import EagleLayers
from llmstack_model_runner.drafts.maker import DraftMaker
from llmstack_model_runner.layers.adaptation import adapted
from llmstack_model_runner.layers.packing import packed_linears
from llmstack_model_runner.layers.sharding import Sharding, sharded
from llmstack_model_runner.models import CausalLM
from llmstack_model_runner.models.dflash import DFlashHead
from llmstack_model_runner.models.eagle import Eagle3Head, EagleHead, ServedSizes
from llmstack_model_runner.models.medusa import MedusaHeads
from llmstack_model_runner.weights import load_weights, read_served_config
from llmstack_types import KVCacheSpec, ModelRunnerConfig

_TOKEN_MAP = "d2t"  # noqa: S105 - the name of a tensor

_KINDS: Mapping[str, type[EagleHead | DFlashHead]] = {"eagle": EagleHead, "eagle3": Eagle3Head, "dflash": DFlashHead}


def load_draft_heads(
    config: ModelRunnerConfig, model: CausalLM, spec: KVCacheSpec, device: torch.device, sharding: Sharding
) -> DraftMaker:
    """The heads that `config` names, beside a served model; each rank has its part of them.

    Raises:
        ModelFilesError: A file is missing or damaged.
        ValueError: They are not supported, or do not fit the served model; the message is one sentence.
    """
    try:
        return _load(config, model, spec, device, sharding)
    except ValueError as error:
        raise ValueError(f"draft head {config.draft_model_path}: {error}") from error


def _load(
    config: ModelRunnerConfig, model: CausalLM, spec: KVCacheSpec, device: torch.device, sharding: Sharding
) -> DraftMaker:
    own, path = config.of_draft_model(), Path(config.draft_model_path)
    found, checkpoint_format, _ = read_served_config(own)
    if checkpoint_format is not None:
        raise ValueError("its weights are quantized, and those of draft heads must be in full precision")
    infos = {} if own.load_format == "dummy" else _tensors(path)
    dtype, size = getattr(torch, spec.dtype), model.vector_size or 0
    names = {name.removeprefix("model.") for name in infos}
    with packed_linears(None), sharded(sharding), adapted(None):
        heads: EagleHead | MedusaHeads | DFlashHead
        if config.draft_head == "medusa":
            heads = MedusaHeads(found, size, spec.vocab_size, names, dtype, device)
        else:
            kind = _KINDS[config.draft_head]
            heads = kind(found, ServedSizes(size, spec.vocab_size, spec.num_layers, names), dtype, device)
    num_bytes = sum(slot.num_elements for slot in heads.slots().values()) * dtype.itemsize
    load_weights(heads, path, own.load_format, dtype, own.seed, device=device)
    if isinstance(heads, MedusaHeads):
        return DraftsByMedusa(heads, num_bytes, spec, config)
    if isinstance(heads, DFlashHead):
        return DraftsByBlock(heads, num_bytes, model, spec, config)
    if isinstance(heads, Eagle3Head):
        heads.map_tokens(_token_map(path, infos))
    return DraftsByHead(EagleLayers(heads, num_bytes, model), spec, config)


def _tensors(folder: Path) -> Mapping[str, Any]:
    """File by the name of each tensor."""
    return {name: file for file in safetensors_files(folder) for name in check_safetensors(file)}


def _token_map(folder: Path, name_to_file: Mapping[str, Path]) -> torch.Tensor | None:
    """The addition to the id of each token of a smaller vocabulary; None without such a tensor."""
    found = next((name for name in (_TOKEN_MAP, f"model.{_TOKEN_MAP}") if name in name_to_file), None)
    if found is None:
        return None
    with safe_open(name_to_file[found], framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(found)
    if tensor.ndim != 1 or tensor.is_floating_point():
        raise ValueError(f"its tensor '{_TOKEN_MAP}' is no list of integers")
    return tensor
