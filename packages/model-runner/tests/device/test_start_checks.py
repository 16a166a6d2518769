"""Checks of the device before weights are read."""

from __future__ import annotations

import pytest
import torch

from llmstack_kernels.caches import CacheSizes
from llmstack_model_runner.device import host_limits, start_checks
from llmstack_model_runner.device.start_checks import set_up_cpu, use_own_gpu
from llmstack_types import ModelRunnerConfig


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs that were made the current one, of four."""
    numbers: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", numbers.append)
    return numbers


def test_each_rank_of_each_engine_core_has_a_gpu_of_its_own(chosen: list[int]) -> None:
    for first_gpu in (0, 2):
        for local_rank in (0, 1):
            use_own_gpu(ModelRunnerConfig("a", num_engines=2, first_gpu=first_gpu, tensor_parallel_size=2), local_rank)
    assert chosen == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            ModelRunnerConfig("a", tensor_parallel_size=8),
            "tensor_parallel_size 8 x pipeline_parallel_size 1 needs 8 GPUs here, and there are 4",
        ),
        (
            ModelRunnerConfig("a", num_engines=3, first_gpu=4, tensor_parallel_size=2),
            "3 engine cores x tensor_parallel_size 2 x pipeline_parallel_size 1 needs 6 GPUs here, and there are 4",
        ),
    ],
)
def test_more_ranks_than_gpus_are_refused(config: ModelRunnerConfig, sentence: str, chosen: list[int]) -> None:
    with pytest.raises(ValueError, match=sentence):
        use_own_gpu(config)
    assert not chosen


def test_weights_beyond_the_caches_are_read_past_them(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[bool] = []
    monkeypatch.setattr(host_limits, "cache_sizes", lambda: CacheSizes(reach=32 << 20))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(start_checks, "stream_weights", switched.append)
    for num_weight_bytes, is_quantized in ((64 << 20, False), (65 << 20, False), (65 << 20, True)):
        set_up_cpu(num_weight_bytes, num_processes=1, is_quantized=is_quantized)
    assert switched == [False, True, False]
