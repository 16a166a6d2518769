"""Start of the other ranks, wherever they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from llmstack_model_files import ModelFilesError, read_model_config
from llmstack_model_runner.device.start_checks import resolve_device, use_own_gpu
from llmstack_parallel.exchange import choose_backend
from llmstack_parallel.launcher import ProcessPeers
from llmstack_parallel.protocols import Peers
from llmstack_types import EngineStartError, ModelRunnerConfig

_NUM_STATES: Final = 2
"""Tensors between two stages: the output of a layer and the residual."""


def start_peers(config: ModelRunnerConfig) -> Peers:
    """Starts the other ranks as processes of this host, or waits for those of other nodes.

    Raises:
        ValueError: There are more ranks than GPUs.
        EngineStartError: They could not be started, or the model's configuration cannot be read.
    """
    device = resolve_device(config.device)
    if device.type == "cuda":
        use_own_gpu(config)
    if config.placement is not None:
        from llmstack_parallel.hosts.peers import HostPeers  # most models have one node

        if config.placement.launcher == "ray":
            from llmstack_parallel.ray_ranks import place_on_ray

            return HostPeers(config, place_on_ray(config))
        return HostPeers(config)
    return ProcessPeers(config, choose_backend(device.type), states_bytes(config))


def states_bytes(config: ModelRunnerConfig) -> int:
    """Upper bound of the states of one step between two stages."""
    try:
        values = read_model_config(Path(config.model_path), json.loads(config.hf_overrides or "{}"))
    except ModelFilesError as error:
        raise EngineStartError(str(error)) from error
    text = values.get("text_config") or values
    sizes = (text.get(name) for name in ("hidden_size", "n_embd", "n_embed"))
    size = next((size for size in sizes if type(size) is int and size > 0), 4096)
    return _NUM_STATES * config.max_num_batched_tokens * size * 4
