"""Model runner: one model on one device, one scheduled step at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from llmstack_kernels.dispatch import backends, torch_build
from llmstack_model_files import ModelFilesError, weights_digest
from llmstack_model_runner.adapters.store import AdapterHost, make_store
from llmstack_model_runner.device.errors import allocation
from llmstack_model_runner.device.profiling import Profiling
from llmstack_model_runner.device.runtime import CudaRuntime, DeviceRuntime
from llmstack_model_runner.device.start_checks import (
    architecture,
    check_max_model_len,
    own_device,
    set_up_cpu,
)
from llmstack_model_runner.layers.adaptation import AdaptedLayers, adapted
from llmstack_model_runner.layers.packing import packed_linears
from llmstack_model_runner.layers.sharding import Sharding, sharded
from llmstack_model_runner.memory.block_copies import BlockCopies, DirectBlockCopies
from llmstack_model_runner.memory.kv_cache_dtype import check_capability, resolve_kv_cache_dtype
from llmstack_model_runner.memory.kv_cache_groups import (
    allocate_storage,
    by_layer,
    describe_groups,
    group_stage_layers,
    max_positions,
    num_storage_layers,
)
from llmstack_model_runner.memory.kv_cache_spec import make_kv_cache_spec
from llmstack_model_runner.memory.layer_reports import LayerReports
from llmstack_model_runner.memory.profile import (
    ALLOCATION_STEP,
    CudaMemoryProbe,
    MemoryProfile,
    graph_bytes,
    profile_memory,
)
from llmstack_model_runner.memory.sizing import host_kv_bytes_of, return_freed_memory, settle_heap
from llmstack_model_runner.memory.streamed_copies import make_block_copies
from llmstack_model_runner.models import CausalLM, Classifier, Model
from llmstack_model_runner.models.choice import make_model
from llmstack_model_runner.models.label_head import LabelHead
from llmstack_model_runner.models.numeric_contract import check_deterministic, describe_numeric_contract, for_ranks
from llmstack_model_runner.sampling import LogitsProcessors, LogitsProcessorType, Sampler, load_logits_processors
from llmstack_model_runner.steps.block_transfer import BlockTransfer
from llmstack_model_runner.steps.gpu.decode_graphs import decode_sizes
from llmstack_model_runner.steps.gpu.steps import DeviceSteps
from llmstack_model_runner.steps.host_steps import HostSteps
from llmstack_model_runner.steps.input_batch import InputBatch
from llmstack_model_runner.steps.largest_steps import largest_steps, num_positions
from llmstack_model_runner.steps.output import PendingOutput
from llmstack_model_runner.steps.part_masks import PartMasks
from llmstack_model_runner.steps.recovery import SettledStep, StepRecovery
from llmstack_model_runner.steps.timing import StepTiming
from llmstack_model_runner.steps.warm_up import (
    MASKED_STEP,
    allow_all,
    check_warm_up,
    for_groups,
    pooling_warm_up_steps,
    warm_up_steps,
)
from llmstack_model_runner.weights import (
    check_quantized,
    describe_quantization,
    kept_weights,
    load_weights,
    num_weight_bytes,
    read_served_config,
    resolve_dtype,
)
from llmstack_types import (
    EngineStartError,
    KVCacheSpec,
    ModelRunnerConfig,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
)

logger = logging.getLogger(__name__)

_LOWER = "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --num-kv-blocks"
_NUM_PROFILE_TOKENS = 256
"""Tokens in the temporary storage that the largest steps are computed with before there is a KV cache."""


class ModelRunnerStateError(RuntimeError):
    """The runner was called before it was ready or after it was shut down."""


class ModelRunner(AdapterHost, BlockTransfer, LayerReports, Profiling):
    """One model on one device; used by one thread.

    The order of calls is `load_model`, `initialize_kv_cache`, `execute_model` and `sleep` or `wake_up`, `shutdown`.

    Attributes:
        timing: Time of the steps so far, by phase.
    """

    def __init__(
        self, config: ModelRunnerConfig, runtime: DeviceRuntime | None = None, sharding: Sharding | None = None
    ) -> None:
        """Stores the configuration; weights are read by `load_model`.

        `runtime` replaces the device runtime in tests. Without it a GPU uses CUDA's and a CPU uses none. With a
        `sharding` it computes one rank's part; a step that fails raises, since the ranks no longer agree.
        """
        self.timing = StepTiming()
        self._sharding = sharding or Sharding()
        self._config = config
        self._sampler = Sampler()
        self._logits_processor_types: list[LogitsProcessorType] = []
        self._device = torch.device("cpu")
        self._runtime = runtime
        self._model: Model | None = None
        self._spec: KVCacheSpec | None = None
        self._numeric_contract = self._kv_cache_note = self._quantization = ""
        self._label_head: LabelHead | None = None
        self._kv_caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies: BlockCopies = DirectBlockCopies([], [])
        self._batch: InputBatch | None = None
        self._steps: HostSteps | DeviceSteps | None = None
        self._recovery = StepRecovery(self._make_room)
        self._num_blocks = self._num_host_blocks = 0
        AdapterHost.__init__(self)

    def load_model(self) -> None:
        """Reads the weights, or generates dummy weights.

        Raises:
            ValueError: The model is not supported; the message is one sentence.
            EngineStartError: A file of the model is missing or damaged; the message is one sentence.
        """
        try:
            self._load_model()
        except ModelFilesError as error:  # the engine core does not depend on llmstack_model_files
            raise EngineStartError(str(error)) from error

    def _load_model(self) -> None:
        config = self._config
        self._device = self._runtime.device if self._runtime is not None else own_device(config)
        self._sampler = Sampler(config.logprobs_mode)
        self._logits_processor_types = load_logits_processors(config.logits_processors)
        model_path = Path(config.model_path)
        self._weights_digest = weights_digest(model_path, of_content=config.digest_weight_content)  # before reading
        model_config, checkpoint_format, scheme = read_served_config(config)
        dtype = resolve_dtype(config.dtype, model_config, model_path, config.load_format)
        check = partial(check_quantized, checkpoint_format=checkpoint_format, scheme=scheme, device=self._device)
        name = architecture(model_config)
        # Attention layers read it too.
        layers = AdaptedLayers() if config.enable_lora else None
        with packed_linears(scheme, config.enable_deterministic_inference), sharded(self._sharding), adapted(layers):
            model = make_model(name, config.model_impl, (model_config, dtype, self._device), self._sharding, check)
        logger.info("model: %s (%s)", name, model.implementation)
        check_max_model_len(config.max_model_len, model.kv_spec.max_model_len)
        model.limit_context(config.max_model_len)
        self._label_head = LabelHead(model, model_config) if isinstance(model, Classifier) else None
        weight_bytes = num_weight_bytes(model, dtype, scheme, checkpoint_format)
        if self._device.type == "cpu":
            is_quantized = scheme is not None or checkpoint_format is not None
            set_up_cpu(weight_bytes, config.num_processes, is_quantized=is_quantized)
        self._quantization = describe_quantization(scheme, dtype, self._device, checkpoint_format)
        if self._quantization:
            logger.info("quantization: %s", self._quantization)
        kv_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, dtype)
        if self._device.type == "cuda":
            check_capability(kv_dtype, torch.cuda.get_device_capability(self._device))
        is_deterministic = config.enable_deterministic_inference
        contract = describe_numeric_contract(model, dtype, self._device, kv_dtype, is_deterministic)
        self._numeric_contract = for_ranks(contract, self._sharding)
        logger.info("numeric contract: %s", self._numeric_contract)
        if is_deterministic:
            check_deterministic(contract)
        with (
            allocation("the weights do not fit on the device", "use --quantization int8, or a smaller model"),
            kept_weights(config, model_config, dtype, self._device, self._sharding) as packed,
        ):
            load_weights(
                model, model_path, config.load_format, dtype, config.seed, scheme, self._device,
                is_batch_invariant=is_deterministic, checkpoint_format=checkpoint_format, packed=packed,
            )  # fmt: skip
        settle_heap(self._device, weight_bytes)
        groups = group_stage_layers(model.kv_spec, config.max_model_len)
        self._kv_cache_note = describe_groups(groups, is_enabled=config.enable_hybrid_kv_cache)
        groups = groups if config.enable_hybrid_kv_cache else ()
        shape = (model, model_config, dtype, config.block_size, self._device, kv_dtype, groups)
        self._spec = make_kv_cache_spec(*shape, config.enable_prompt_embeds)
        self._adapters = make_store(model, layers, config, dtype, self._device)
        self._model = model

    def kv_cache_spec(self) -> KVCacheSpec:
        """Shape of the KV storage and abilities of the model. May be called after `load_model`."""
        if self._spec is None:
            raise ModelRunnerStateError("the model is not loaded")
        return self._spec

    def available_kv_bytes(self, *, is_size_given: bool = False) -> int:
        """Memory in bytes that the KV cache may use on the device.

        With a size given by the user this is all available memory, else a share of it. On a CPU the share never exceeds
        what all rows need at full length, since other processes need the memory too.
        """
        config, spec = self._config, self.kv_cache_spec()
        if self._device.type == "cuda":
            share = 1.0 if is_size_given else config.gpu_memory_utilization
            lost_bytes = 2 * num_storage_layers(spec) * ALLOCATION_STEP + spec.bytes_per_block  # the scratch block
            return max(0, self._profile_memory(share).kv_bytes(share) - lost_bytes)
        return host_kv_bytes_of(config, spec, is_size_given=is_size_given)

    def run_largest_steps(self) -> int:
        """Computes the steps that need the most memory with a small temporary storage, and returns its bytes.

        Raises:
            EngineStartError: The device has not enough memory for these steps.
        """
        config, spec = self._config, self.kv_cache_spec()
        self._allocate(num_blocks := -(-_NUM_PROFILE_TOKENS // spec.block_size))
        limits = (config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len, spec.block_size)
        steps = list(largest_steps(*limits, is_generative=spec.is_generative))
        self._hold_positions(num_positions(steps))
        for step in for_groups(steps, spec.groups):
            check_warm_up(self.execute_model(step).result())
        self._release_kv_cache()
        return_freed_memory(self._device)  # captured steps contain reference cycles
        return (num_blocks + self._has_device_rows) * spec.bytes_per_block

    def _profile_memory(self, share: float) -> MemoryProfile:
        config, spec = self._config, self.kv_cache_spec()
        is_capturing = self._has_device_rows and not config.enforce_eager
        sizes = decode_sizes(config.max_num_seqs, config.cuda_graph_sizes) if is_capturing else []
        probe = CudaMemoryProbe(self._device)
        # As many as the whole device could hold: the steps need tables before it is known what is left for blocks.
        self._hold_positions(max_positions(config, spec, probe.total_bytes // spec.bytes_per_block))
        profile = profile_memory(probe, self.run_largest_steps, graph_bytes(sizes, spec.vocab_size))
        for line in profile.table(share, spec.bytes_per_block, spec.block_size, config.max_model_len):
            logger.info("%s", line)
        return profile

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocates KV storage for `num_blocks` blocks and warms up, so that the first request is not slower.

        `num_host_blocks` more blocks in host memory hold swapped-out requests.
        """
        config, spec = self._config, self.kv_cache_spec()
        self._num_blocks, self._num_host_blocks = num_blocks, num_host_blocks
        steps = self._allocate(num_blocks, num_host_blocks)
        self._hold_positions(max_positions(config, spec, num_blocks))
        max_num_tokens = min(config.max_num_batched_tokens, config.max_model_len)
        warm_up = warm_up_steps(num_blocks, spec.block_size, max_num_tokens, config.max_num_seqs)
        if not spec.is_generative:
            warm_up = pooling_warm_up_steps(num_blocks, spec.block_size, max_num_tokens)
        for step in for_groups(warm_up, spec.groups):
            masks = partial(allow_all, step, spec.vocab_size) if step.step == MASKED_STEP else None
            check_warm_up(self.execute_model(step, masks).result())
            if not self._sharding.is_last_stage and step.scheduled_requests:
                self.append_tokens(None)
        steps.finish_warm_up()
        self.timing.reset()

    def _hold_positions(self, count: int) -> None:
        if self._model is not None:
            self._model.hold_positions(count)

    def _allocate(self, num_blocks: int, num_host_blocks: int = 0) -> HostSteps | DeviceSteps:
        """Allocates the KV storage and creates the input batch and the steps."""
        config, spec = self._config, self.kv_cache_spec()
        self._recovery = StepRecovery(self._make_room)
        num_device_blocks = num_blocks + self._has_device_rows  # one more, the scratch block of padding rows
        with allocation(f"a KV cache of {num_device_blocks * spec.bytes_per_block} bytes cannot be allocated", _LOWER):
            storage = allocate_storage(spec, num_device_blocks, self._device)
        self._kv_caches = self._reporting(by_layer(storage, spec))
        self._copies = make_block_copies(storage, spec, num_host_blocks, self._device)
        size = (config.max_num_seqs, spec.vocab_size, self._device)
        processors = LogitsProcessors([make(*size) for make in self._logits_processor_types])
        self._batch = InputBatch(
            config.max_num_seqs, config.max_model_len, spec.block_size, num_blocks, spec.vocab_size, processors,
            spec.groups, self._adapters,
        )  # fmt: skip
        if self._adapters is not None:
            self._adapters.make_slots(config.max_loras, config.max_num_batched_tokens)
        self._steps = self._make_steps(self._batch)
        return self._steps

    def execute_model(
        self, scheduled: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingOutput:
        """Starts one step: row updates, copies of blocks, forward pass, sampling.

        Without rows it does only updates and copies. `token_masks`, for constrained rows, is called before sampling.

        Raises:
            InputBatchError: The step is inconsistent with the runner's rows.
            ValueError: A copy names a block that does not exist.
        """
        steps, batch = self._steps, self._batch
        if steps is None or batch is None:
            raise ModelRunnerStateError("the KV cache is not initialized")
        steps.settle(scheduled)
        with self.timing.prepare:
            step = batch.update(scheduled)
            if scheduled.swap_outs or scheduled.swap_ins or scheduled.block_copies:
                with torch.inference_mode():
                    self._copies.apply(scheduled)
            self._recovery.unwritten.follow(scheduled)
        pending: PendingOutput = SettledStep(ModelRunnerOutput())
        if step.request_ids:
            compute = steps.run if token_masks is None else PartMasks(step, token_masks).masked(steps.run)
            pending = self._recovery.run(batch, step, compute) if self._sharding.is_whole else compute(step)
        steps.follow(pending)
        return pending

    def append_tokens(self, sampled_token_ids: Sequence[Sequence[int]] | None) -> None:
        """Tells a stage without the head what the oldest step that it does not know sampled, row by row."""
        if isinstance(self._steps, HostSteps):
            self._steps.append_tokens(sampled_token_ids)

    def backends(self) -> Mapping[str, str]:
        """Operation to the name of its implementation.

        Further entries: `model`, the origin of the modelling code; `weights`, a digest of their files; `kv_cache`, what
        layers free; `numeric_contract`, whether logits are bit-equal in any batch; `quantization`, how quantized
        linear layers are computed; `decode`, how small decode steps are computed; `torch`, its build.
        """
        model = {}
        if self._model is not None:
            model = {"model": self._model.implementation, "numeric_contract": self._numeric_contract}
            model["weights"] = self._weights_digest
        if self._quantization:
            model["quantization"] = self._quantization
        if self._kv_cache_note:
            model["kv_cache"] = self._kv_cache_note
        if self._steps is not None and self._steps.describe():
            model["decode"] = self._steps.describe()
        return model | backends(self._device.type) | {"torch": torch_build(self._device.type)}

    def sleep(self, level: int) -> None:
        """Frees the KV storage and, with level 2, the weights, which `wake_up` then loads again."""
        self._release_kv_cache()
        if level > 1:
            self._model = self._label_head = None
        return_freed_memory(self._device)

    def wake_up(self) -> None:
        """Restores what `sleep` freed: the same weights, and an empty KV storage of the same size.

        Raises:
            ValueError: The model can no longer be loaded.
        """
        if self._model is None:
            self.load_model()
        self.initialize_kv_cache(self._num_blocks, self._num_host_blocks)

    def shutdown(self) -> None:
        """Releases the device. Idempotent."""
        self._release_kv_cache()
        self._model = self._label_head = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _make_room(self) -> None:
        if isinstance(self._steps, DeviceSteps):
            self._steps.make_room()
        return_freed_memory(self._device)

    def _release_kv_cache(self) -> None:
        """Frees the KV storage with the rows and captured steps that refer to it."""
        self._batch = self._steps = None
        self._copies.close()
        self._copies = DirectBlockCopies([], [])
        self._kv_caches = []

    @property
    def _has_device_rows(self) -> bool:
        return isinstance(self._model, CausalLM) and (self._runtime is not None or self._device.type == "cuda")

    def _make_steps(self, batch: InputBatch) -> HostSteps | DeviceSteps:
        config, model, kv_caches = self._config, self._model, self._kv_caches
        if model is None:
            raise ModelRunnerStateError("the model is not loaded")
        if isinstance(model, CausalLM) and self._has_device_rows:
            runtime = self._runtime or CudaRuntime(self._device)
            return DeviceSteps(model, batch, kv_caches, self._sampler, runtime, config, self.timing, self._adapters)
        is_capturing = self._device.type == "cpu" and not config.enforce_eager
        return HostSteps(
            model, batch, kv_caches, self._sampler, self._device, self.timing, label_head=self._label_head,
            max_num_captured_blocks=-(-config.max_model_len // config.block_size) if is_capturing else 0,
            sharding=self._sharding, adapters=self._adapters, takes_vectors=config.enable_prompt_embeds,
        )  # fmt: skip
