"""Runners over a small GPT-2, with rows on a stand-in of a device or on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmstack_kernels.testing import runs_native_kernels
from llmstack_model_runner.device.runtime import DeviceRuntime
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import write_gpt2_checkpoint
from llmstack_types import ModelRunnerConfig, SamplingParams

NUM_BLOCKS = 96
GREEDY = SamplingParams(temperature=0.0)
needs_native_kernels = pytest.mark.skipif(
    not runs_native_kernels(), reason="needs native kernels: they are not built, or LLMSTACK_KERNELS chooses others"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose heads the native attention takes."""
    return write_gpt2_checkpoint(tmp_path_factory.mktemp("gpt2"), n_embd=64)


def start(folder: Path, runtime: DeviceRuntime | None, num_state_blocks: int = 0, **options: Any) -> ModelRunner:
    """A runner of this checkpoint with `NUM_BLOCKS` blocks of 4 tokens."""
    values: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 128, **options}
    runner = ModelRunner(ModelRunnerConfig(str(folder), block_size=4, device="cpu", **values), runtime)
    runner.load_model()
    torch.set_num_threads(1)
    runner.initialize_kv_cache(NUM_BLOCKS, 0, num_state_blocks)
    return runner
