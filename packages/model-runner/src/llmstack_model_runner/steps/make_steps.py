"""The kind of steps that fits a model and its device."""

from __future__ import annotations

import torch

from llmstack_model_runner.adapters.store import AdapterStore
from llmstack_model_runner.device.runtime import CudaRuntime, DeviceRuntime
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.media.cross_store import CrossStore
from llmstack_model_runner.models import CausalLM, Model
from llmstack_model_runner.models.heads import Heads
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.sampling import Sampler
from llmstack_model_runner.steps.computation import FindVectors
from llmstack_model_runner.steps.gpu.steps import DeviceSteps
from llmstack_model_runner.steps.host_steps import HostSteps
from llmstack_model_runner.steps.input_batch import InputBatch
from llmstack_model_runner.steps.timing import StepTiming
from llmstack_types import ModelRunnerConfig


def has_device_rows(model: Model | None, device: torch.device, runtime: DeviceRuntime | None) -> bool:
    """Whether the rows of a step are on the device, which computes steps asynchronously."""
    needs_host = not isinstance(model, CausalLM) or model.moves_positions or model.cross_kv is not None
    return not needs_host and (runtime is not None or device.type == "cuda")


def make_steps(
    model: Model,
    batch: InputBatch,
    kv_caches: KVCaches,
    sampler: Sampler,
    config: ModelRunnerConfig,
    timing: StepTiming,
    find_vectors: FindVectors,
    *,
    device: torch.device,
    runtime: DeviceRuntime | None,
    heads: Heads,
    sharding: Sharding,
    adapters: AdapterStore | None,
    cross: CrossStore | None,
) -> HostSteps | DeviceSteps:
    """Steps over a batch and a KV storage; see the classes."""
    if isinstance(model, CausalLM) and has_device_rows(model, device, runtime):
        runtime = runtime or CudaRuntime(device)
        return DeviceSteps(model, batch, kv_caches, sampler, runtime, config, timing, find_vectors, adapters, heads)
    # A replay gives no states between layers, which EAGLE 3 and DFlash read.
    reads_layers = config.draft_head in ("eagle3", "dflash")
    is_capturing = device.type == "cpu" and not config.enforce_eager and not reads_layers
    return HostSteps(
        model, batch, kv_caches, sampler, device, timing, find_vectors, heads=heads,
        max_num_captured_blocks=-(-config.max_model_len // config.block_size) if is_capturing else 0,
        sharding=sharding, adapters=adapters, cross=cross,
    )  # fmt: skip
