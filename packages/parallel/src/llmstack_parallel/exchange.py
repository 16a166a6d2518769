"""Choice of how ranks exchange tensors."""

from __future__ import annotations

from pathlib import Path

from llmstack_parallel.collectives.shared_memory import SharedMemoryExchange
from llmstack_parallel.protocols import Exchange
from llmstack_parallel.rank_loop import START_TIMEOUT_S
from llmstack_parallel.segments import RankSegments, can_share_memory
from llmstack_parallel.topology import Topology
from llmstack_types import ModelRunnerConfig

SHARED_MEMORY, GLOO, NCCL = "shared_memory", "gloo", "nccl"


def choose_backend(device_type: str) -> str:
    """The best backend for ranks of one host."""
    if device_type == "cuda":
        return NCCL
    return SHARED_MEMORY if can_share_memory() else GLOO


def make_exchange(
    backend: str, config: ModelRunnerConfig, rank: int, segments: RankSegments, directory: Path
) -> Exchange:
    """One rank's exchange; with torch.distributed it waits for all ranks."""
    topology = Topology(config.tensor_parallel_size, config.pipeline_parallel_size)
    if backend == SHARED_MEMORY:
        return SharedMemoryExchange(topology, rank, segments)
    from llmstack_parallel.collectives.torch_distributed import TorchExchange  # a second of imports

    is_deterministic = config.enable_deterministic_inference
    return TorchExchange(topology, rank, backend, directory, START_TIMEOUT_S, is_deterministic=is_deterministic)
