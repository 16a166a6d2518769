"""Checks of device and model configuration before weights are read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from llmstack_kernels.linear.native import stream_weights
from llmstack_model_runner.device.host_limits import exceed_caches, num_compute_threads
from llmstack_types import ModelRunnerConfig
from llmstack_types.vocabulary import Device, words_of

logger = logging.getLogger(__name__)

_LEAST_CAPABILITY = (8, 0)  # bfloat16 in tensor cores, and copies that a kernel does not wait for


def resolve_device(name: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`; `auto` prefers a GPU.

    Raises:
        ValueError: The name is unknown, there is no GPU, or the kernels do not support it.
    """
    if name not in words_of(Device):
        *others, last = words_of(Device)
        raise ValueError(f"device {name!r} is unknown; use {', '.join(others)} or {last}")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError("device cuda is not available: torch finds no GPU")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    _check_capability(torch.cuda.get_device_capability())
    return torch.device("cuda")


def own_device(config: ModelRunnerConfig) -> torch.device:
    """The device of a runner. A runner without other ranks chooses its GPU here; ranks have chosen before.

    Raises:
        ValueError: There is no such device, or there are too few.
    """
    device = resolve_device(config.device)
    if device.type == "cuda" and config.num_ranks == 1:
        use_own_gpu(config)
    return device


def use_own_gpu(config: ModelRunnerConfig, local_rank: int = 0) -> None:
    """Makes the GPU of a rank the current one of this thread. Each rank of each engine core of a machine has its own.

    Raises:
        ValueError: There are fewer GPUs than ranks.
    """
    num_ranks, num_gpus = config.num_local_ranks, torch.cuda.device_count()
    if num_gpus < config.first_gpu + num_ranks:
        sizes = f"tensor_parallel_size {config.tensor_parallel_size} x pipeline_parallel_size "
        sizes += f"{config.pipeline_parallel_size}"
        if config.num_engines > 1:
            sizes = f"{config.num_engines} engine cores x {sizes}"
        raise ValueError(f"{sizes} needs {config.num_processes} GPUs here, and there are {num_gpus}")
    torch.cuda.set_device(config.first_gpu + local_rank)


def set_up_cpu(num_weight_bytes: int, num_processes: int, *, is_quantized: bool) -> None:
    """Chooses PyTorch's number of threads on a CPU that `num_processes` such processes share, and how weights are read.

    PyTorch's default respects affinity and OMP_NUM_THREADS, but not the CPU quota of a control group.
    """
    num_threads = num_compute_threads(num_weight_bytes, torch.get_num_threads(), num_processes=num_processes)
    torch.set_num_threads(num_threads)
    logger.info("CPU threads: %d", num_threads)
    # Measured: quantized weights gain nothing.
    stream_weights(exceed_caches(num_weight_bytes) and not is_quantized)


def _check_capability(capability: tuple[int, int]) -> None:
    if capability < _LEAST_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (_LEAST_CAPABILITY, capability))
        raise ValueError(
            f"the GPU has compute capability {found}, and {needed} is needed; "
            "set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )


def check_max_model_len(max_model_len: int, num_positions: int) -> None:
    """Raises ValueError if requests could grow beyond the model's positions."""
    if max_model_len > num_positions:
        raise ValueError(
            f"max_model_len {max_model_len} is more than the {num_positions} positions that the model supports"
        )


def architecture(model_config: Mapping[str, Any]) -> str:
    """The name of the model's architecture; `model_config` is the parsed config.json.

    Raises:
        ValueError: The configuration names no architecture.
    """
    architectures = model_config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ValueError("config.json names no architecture: the list `architectures` is missing or empty")
    return architectures[0]
