"""Runs one model on one device, one scheduled step at a time."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from llmstack_kernels.dispatch import backends
from llmstack_kernels.linear import bits_per_weight
from llmstack_kv_cache.storage import allocate_kv_storage
from llmstack_model_files import ModelFilesError, overridden, read_json
from llmstack_model_runner.block_copies import BlockCopies, DirectBlockCopies
from llmstack_model_runner.device.copy_streams import CudaCopyStreams
from llmstack_model_runner.device.decode_graphs import decode_sizes
from llmstack_model_runner.device.runtime import CudaRuntime, DeviceRuntime
from llmstack_model_runner.device.steps import DeviceSteps
from llmstack_model_runner.device.streamed_copies import StreamedBlockCopies
from llmstack_model_runner.device_memory import (
    available_host_kv_bytes,
    obtainable_host_kv_bytes,
    return_freed_memory,
    working_bytes,
)
from llmstack_model_runner.host_limits import num_compute_threads
from llmstack_model_runner.host_steps import HostSteps
from llmstack_model_runner.input_batch import InputBatch
from llmstack_model_runner.kv_cache_dtype import check_capability, resolve_kv_cache_dtype
from llmstack_model_runner.kv_cache_spec import make_kv_cache_spec
from llmstack_model_runner.largest_steps import largest_steps
from llmstack_model_runner.layers.packing import packed_linears
from llmstack_model_runner.memory_profile import (
    ALLOCATION_STEP,
    CudaMemoryProbe,
    MemoryProfile,
    graph_bytes,
    profile_memory,
)
from llmstack_model_runner.models import CausalLM, Classifier, Model
from llmstack_model_runner.models.choice import choose_model_class
from llmstack_model_runner.numeric_contract import check_deterministic, describe_numeric_contract
from llmstack_model_runner.out_of_memory import allocation
from llmstack_model_runner.part_masks import PartMasks
from llmstack_model_runner.pooling.label_head import LabelHead
from llmstack_model_runner.pooling.warm_up import pooling_warm_up_steps
from llmstack_model_runner.sampling import (
    LogitsProcessors,
    LogitsProcessorType,
    Sampler,
    load_logits_processors,
)
from llmstack_model_runner.start_checks import architecture, check_max_model_len, resolve_device
from llmstack_model_runner.step_output import PendingOutput
from llmstack_model_runner.step_recovery import SettledStep, StepRecovery
from llmstack_model_runner.step_timing import StepTiming
from llmstack_model_runner.warm_up import MASKED_STEP, allow_all, check_warm_up, warm_up_steps
from llmstack_model_runner.weights import (
    describe_quantization,
    load_weights,
    refuse_quantized_checkpoint,
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
"""Room of the storage that the largest steps are computed with before there is a KV cache."""


class ModelRunnerStateError(RuntimeError):
    """The runner was used before it was ready, or after it was shut down."""


class ModelRunner:
    """One model on one device; used by one thread.

    The order of calls is `load_model`, `initialize_kv_cache`, any number of `execute_model`, `shutdown`. Between steps
    it can `sleep` and `wake_up`.

    Attributes:
        timing: Where the time of the steps went so far.
    """

    def __init__(self, config: ModelRunnerConfig, runtime: DeviceRuntime | None = None) -> None:
        """Reads nothing yet.

        `runtime` is what steps of a device run on, for tests: without it, a GPU has CUDA's and a CPU none.
        """
        self.timing = StepTiming()
        self._config = config
        self._sampler = Sampler()
        self._logits_processor_types: list[LogitsProcessorType] = []
        self._device = torch.device("cpu")
        self._runtime = runtime
        self._model: Model | None = None
        self._spec: KVCacheSpec | None = None
        self._numeric_contract = ""
        self._label_head: LabelHead | None = None
        self._kv_caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies: BlockCopies = DirectBlockCopies([], [])
        self._batch: InputBatch | None = None
        self._steps: HostSteps | DeviceSteps | None = None
        self._recovery = StepRecovery(self._make_room)
        self._num_blocks = self._num_host_blocks = 0

    def load_model(self) -> None:
        """Reads or makes the weights.

        Raises:
            ValueError: The model cannot be run; the text says why in one sentence.
            EngineStartError: A file of it is missing or damaged; likewise.
        """
        try:
            self._load_model()
        except ModelFilesError as error:  # those who call know nothing of files
            raise EngineStartError(str(error)) from error

    def _load_model(self) -> None:
        config = self._config
        self._device = resolve_device(config.device) if self._runtime is None else self._runtime.device
        if self._device.type != "cpu" and config.num_engines > 1:
            raise ValueError("several engine cores share processors only: they would take the same GPU")
        self._sampler = Sampler(config.logprobs_mode)
        self._logits_processor_types = load_logits_processors(config.logits_processors)
        model_path = Path(config.model_path)
        model_config = overridden(read_json(model_path, "config.json"), json.loads(config.hf_overrides or "{}"))
        refuse_quantized_checkpoint(model_config)
        model_class = choose_model_class(architecture(model_config), config.model_impl)
        logger.info("model: %s (%s)", architecture(model_config), model_class.implementation)
        dtype = resolve_dtype(config.dtype, model_config, model_path, config.load_format)
        with packed_linears(config.quantization, config.enable_deterministic_inference):  # attention asks as well
            model = model_class(model_config, dtype, self._device)
        check_max_model_len(config.max_model_len, model.kv_spec.max_model_len)
        model.limit_context(config.max_model_len)
        self._label_head = LabelHead(model, model_config) if isinstance(model, Classifier) else None
        if self._device.type == "cpu":
            # Torch's own default knows affinity and OMP_NUM_THREADS, not the quota of a control group.
            num_bytes = num_weight_bytes(model, dtype, config.quantization)
            num_threads = num_compute_threads(num_bytes, torch.get_num_threads(), num_processes=config.num_engines)
            torch.set_num_threads(num_threads)
            logger.info("CPU threads: %d", num_threads)
        if config.quantization is not None:
            logger.info("quantization: %s", describe_quantization(config.quantization, dtype, self._device))
        kv_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, dtype)
        if self._device.type == "cuda":
            check_capability(kv_dtype, torch.cuda.get_device_capability(self._device))
        self._spec = make_kv_cache_spec(model, model_config, dtype, config.block_size, self._device, kv_dtype)
        self._numeric_contract = describe_numeric_contract(
            model, dtype, self._device, kv_dtype, config.enable_deterministic_inference
        )
        logger.info("numeric contract: %s", self._numeric_contract)
        if config.enable_deterministic_inference:
            check_deterministic(self._numeric_contract)
        with allocation("the weights do not fit on the device", "use --quantization int8, or a smaller model"):
            load_weights(
                model,
                model_path,
                config.load_format,
                dtype,
                config.seed,
                config.quantization,
                self._device,
                is_batch_invariant=config.enable_deterministic_inference,
            )
        self._model = model

    def kv_cache_spec(self) -> KVCacheSpec:
        """Shape of the KV storage; after `load_model`."""
        if self._spec is None:
            raise ModelRunnerStateError("the model is not loaded")
        return self._spec

    def available_kv_bytes(self, *, is_size_given: bool = False) -> int:
        """Memory that KV storage may take on the device.

        All there is where the user has given a size; else a share, and on a CPU, whose memory others need too, never
        more than all rows at full length need.
        """
        config, spec = self._config, self.kv_cache_spec()
        if self._device.type == "cuda":
            share = 1.0 if is_size_given else config.gpu_memory_utilization
            lost_bytes = 2 * spec.num_layers * ALLOCATION_STEP + spec.bytes_per_block  # a block is nobody's
            kv_bytes = self._profile_memory(share).kv_bytes(share) - lost_bytes
            return max(0, kv_bytes)
        token_bytes = spec.bytes_per_block // spec.block_size
        num_logits = min(config.max_num_seqs * (1 + config.max_num_drafts), config.max_num_batched_tokens)
        step_bytes = working_bytes(config.max_num_batched_tokens, num_logits, spec.vocab_size, token_bytes)
        if is_size_given:
            return obtainable_host_kv_bytes(step_bytes) // config.num_engines
        num_row_blocks = -(-config.max_model_len // config.block_size)
        needed_bytes = config.max_num_seqs * num_row_blocks * spec.bytes_per_block
        return min(needed_bytes, available_host_kv_bytes() // config.num_engines)

    def run_largest_steps(self) -> int:
        """Computes the steps that need the most memory, with a small storage that goes again; the bytes of that.

        Raises:
            EngineStartError: There is not room even for these.
        """
        config, spec = self._config, self.kv_cache_spec()
        num_blocks = -(-_NUM_PROFILE_TOKENS // spec.block_size)
        self._allocate(num_blocks)
        limits = (config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len, spec.block_size)
        for step in largest_steps(*limits, is_generative=spec.is_generative):
            check_warm_up(self.execute_model(step).result())
        self._release_kv_cache()
        return_freed_memory(self._device)  # recorded steps refer to themselves
        return (num_blocks + self._has_device_rows) * spec.bytes_per_block

    def _profile_memory(self, share: float) -> MemoryProfile:
        config, spec = self._config, self.kv_cache_spec()
        is_recording = self._has_device_rows and not config.enforce_eager
        sizes = decode_sizes(config.max_num_seqs, config.cuda_graph_sizes) if is_recording else []
        reserve_bytes = graph_bytes(sizes, spec.vocab_size)
        profile = profile_memory(CudaMemoryProbe(self._device), self.run_largest_steps, reserve_bytes)
        for line in profile.table(share, spec.bytes_per_block, spec.block_size, config.max_model_len):
            logger.info("%s", line)
        return profile

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocates KV storage for `num_blocks` blocks and warms up, so that the first request is not slower.

        Swapped-out requests use further `num_host_blocks` in the host's memory, which they take when they are written.
        """
        config, spec = self._config, self.kv_cache_spec()
        self._num_blocks, self._num_host_blocks = num_blocks, num_host_blocks
        steps = self._allocate(num_blocks, num_host_blocks)
        max_num_tokens = min(config.max_num_batched_tokens, config.max_model_len)
        warm_up = warm_up_steps(num_blocks, spec.block_size, max_num_tokens, config.max_num_seqs)
        if not spec.is_generative:
            warm_up = pooling_warm_up_steps(num_blocks, spec.block_size, max_num_tokens)
        for step in warm_up:
            masks = partial(allow_all, step, spec.vocab_size) if step.step == MASKED_STEP else None
            check_warm_up(self.execute_model(step, masks).result())
        steps.finish_warm_up()
        self.timing.reset()

    def _allocate(self, num_blocks: int, num_host_blocks: int = 0) -> HostSteps | DeviceSteps:
        """Storage, rows, and what computes steps."""
        config, spec = self._config, self.kv_cache_spec()
        self._recovery = StepRecovery(self._make_room)
        dtype = getattr(torch, spec.kv_cache_dtype)
        shape = (spec.num_kv_heads, spec.block_size, spec.head_dim, dtype)
        num_device_blocks = num_blocks + self._has_device_rows  # one for the rows that fill a step up
        num_bytes = num_device_blocks * spec.bytes_per_block
        with allocation(f"the KV cache of {num_bytes} bytes could not be allocated", _LOWER):
            self._kv_caches = allocate_kv_storage(spec.num_layers, num_device_blocks, *shape, self._device)
        if self._device.type == "cuda":
            self._copies = StreamedBlockCopies(self._kv_caches, num_host_blocks, CudaCopyStreams(self._device))
        else:
            host_caches = (
                allocate_kv_storage(spec.num_layers, num_host_blocks, *shape, "cpu") if num_host_blocks else []
            )
            self._copies = DirectBlockCopies(self._kv_caches, host_caches)
        processors = LogitsProcessors(
            [make(config.max_num_seqs, spec.vocab_size, self._device) for make in self._logits_processor_types]
        )
        self._batch = InputBatch(
            config.max_num_seqs, config.max_model_len, spec.block_size, num_blocks, spec.vocab_size, processors
        )
        self._steps = self._make_steps(self._batch)
        return self._steps

    @torch.inference_mode()
    def execute_model(
        self, scheduled: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingOutput:
        """Starts one step: row updates, copies of blocks, forward pass, sampling. An empty step has the first two.

        `token_masks` is called between forward pass and sampling, where rows of the step are constrained.

        Raises:
            InputBatchError: The step contradicts what the runner knows of its requests.
            ValueError: A copy names a block that does not exist.
        """
        steps, batch = self._steps, self._batch
        if steps is None or batch is None:
            raise ModelRunnerStateError("the KV cache is not initialized")
        steps.settle(scheduled)
        with self.timing.phase("prepare"):
            step = batch.update(scheduled)
            self._copies.apply(scheduled)
            self._recovery.follow_copies(scheduled)
        pending: PendingOutput = SettledStep(ModelRunnerOutput())
        if step.request_ids:
            masks = PartMasks(step, token_masks)
            pending = self._recovery.run(batch, step, lambda part: steps.run(part, masks.of(part)))
        steps.follow(pending)
        return pending

    def backends(self) -> Mapping[str, str]:
        """Operation to the implementation that runs it; once the model is loaded, `model` is whose modelling code.

        `numeric_contract` is whether logits are bit-equal however they are computed, and if not, why; `quantization` is
        how linear layers are computed, if they are quantized; `decode` how steps of a few rows are.
        """
        model = {}
        if self._model is not None:
            model = {"model": self._model.implementation, "numeric_contract": self._numeric_contract}
        if self._spec is not None and self._config.quantization is not None:
            dtype = getattr(torch, self._spec.dtype)
            model["quantization"] = describe_quantization(self._config.quantization, dtype, self._device)
        if self._steps is not None and self._steps.describe():
            model["decode"] = self._steps.describe()
        return model | dict(backends(self._device.type))

    def sleep(self, level: int) -> None:
        """Gives KV storage back, and with level 2 the weights too: they are read, or made, once more by `wake_up`."""
        self._release_kv_cache()
        if level > 1:
            self._model = self._label_head = None
        return_freed_memory(self._device)

    def wake_up(self) -> None:
        """Brings back what `sleep` gave back: the same weights, and KV storage of the same size without content.

        Raises:
            ValueError: The model has become unusable meanwhile.
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
        """Recorded steps and rows refer to it, so they go too."""
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
            return DeviceSteps(model, batch, kv_caches, self._sampler, runtime, config, self.timing)
        is_recording = self._device.type == "cpu" and not config.enforce_eager
        return HostSteps(
            model,
            batch,
            kv_caches,
            self._sampler,
            self._device,
            self.timing,
            label_head=self._label_head,
            max_num_recorded_blocks=-(-config.max_model_len // config.block_size) if is_recording else 0,
        )


def num_weight_bytes(model: Model, dtype: torch.dtype, quantization: str | None = None) -> int:
    """Size of what a step reads of the model's weights, all of which are taken for linear layers."""
    num_bits = 8 * dtype.itemsize if quantization is None else bits_per_weight(quantization)
    return int(sum(math.prod(slot.shape) for slot in model.slots().values()) * num_bits / 8)
