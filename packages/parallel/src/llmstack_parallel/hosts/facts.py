"""Facts that must be equal on all nodes that share one model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

import torch

from llmstack_engine_client.hosts.messages import MAX_TEXT_LENGTH, Facts, own_version
from llmstack_kernels.dispatch import backends, torch_build
from llmstack_model_files import ModelFilesError, weights_digest
from llmstack_model_runner.device.start_checks import resolve_device
from llmstack_parallel.messages import VERSION
from llmstack_types import EngineStartError, ModelRunnerConfig

# They may differ: what they lead to is compared by the digest of the weights, and by keys that fit.
_OF_ONE_NODE: Final = ("model_path", "placement", "num_engines", "first_gpu", "digest_weight_content")
# They come first: the defaults of others follow from them.
_SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size")


def facts_of(config: ModelRunnerConfig) -> Facts:
    """The release, options, kernels and a digest of the model's content, which takes about as long as loading it.

    Raises:
        EngineStartError: The model's files cannot be read.
    """
    names = [field.name for field in dataclasses.fields(config) if field.name not in _OF_ONE_NODE]
    nodes = {} if config.placement is None else {"nnodes": str(config.placement.num_nodes)}
    facts = {"version": f"{own_version()}, rank messages {VERSION}"} | nodes
    facts |= {name: str(getattr(config, name)) for name in (*_SIZES, *names)}
    facts |= _device_facts(config)
    try:
        facts["digest of the model's files"] = weights_digest(Path(config.model_path), of_content=True)
    except (OSError, ModelFilesError) as error:
        raise EngineStartError(f"the model's files cannot be read: {error}") from error
    return tuple((name[:256], value[:MAX_TEXT_LENGTH]) for name, value in facts.items())


def _device_facts(config: ModelRunnerConfig) -> dict[str, str]:
    """The devices of the ranks. On GPUs each rank needs one of its own."""
    device = resolve_device(config.device).type
    facts = {"device": device}
    if device == "cuda":
        needed = config.num_local_ranks
        facts[f"number of GPUs for the {needed} ranks of a node"] = str(min(needed, torch.cuda.device_count()))
    facts |= {f"kernel {name}": value for name, value in backends(device).items()}
    return facts | {"torch": torch_build(device)}
