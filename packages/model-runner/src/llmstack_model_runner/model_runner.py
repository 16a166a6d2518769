"""Model runner: one model on one device, one scheduled step at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from llmstack_kernels.dispatch import backends, device_report
from llmstack_model_files import ModelFilesError
from llmstack_model_runner.adapters.store import AdapterStore
from llmstack_model_runner.device.errors import allocation
from llmstack_model_runner.device.profiling import Profiling
from llmstack_model_runner.device.runtime import DeviceRuntime
from llmstack_model_runner.device.start_checks import own_device
from llmstack_model_runner.drafts.drafts import Drafts
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.loading import ModelReport, load_served_model
from llmstack_model_runner.memory.block_copies import BlockCopies, DirectBlockCopies
from llmstack_model_runner.memory.kv_cache_groups import (
    allocate_states,
    allocate_storage,
    block_layers,
    by_layer,
    max_positions,
)
from llmstack_model_runner.memory.layer_reports import LayerReports
from llmstack_model_runner.memory.profile import CudaMemoryProbe, MemoryProfile, graph_bytes, lost_bytes, profile_memory
from llmstack_model_runner.memory.sizing import host_kv_bytes_of, largest_rows, media_bytes, return_freed_memory
from llmstack_model_runner.memory.streamed_copies import make_block_copies
from llmstack_model_runner.models import Model
from llmstack_model_runner.models.heads import NO_HEADS
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.sampling import LogitsProcessors, LogitsProcessorType, Sampler, load_logits_processors
from llmstack_model_runner.sampling.infill import SamplingByTexts
from llmstack_model_runner.steps.block_transfer import BlockTransfer
from llmstack_model_runner.steps.gpu.decode_graphs import decode_sizes, most_decode_rows
from llmstack_model_runner.steps.gpu.steps import DeviceSteps
from llmstack_model_runner.steps.host_steps import HostSteps
from llmstack_model_runner.steps.input_batch import InputBatch
from llmstack_model_runner.steps.largest_steps import largest_steps, num_positions
from llmstack_model_runner.steps.make_steps import has_device_rows, make_steps
from llmstack_model_runner.steps.output import PendingOutput
from llmstack_model_runner.steps.part_masks import PartMasks
from llmstack_model_runner.steps.recovery import SettledStep, StepRecovery
from llmstack_model_runner.steps.step_media import StepMedia, make_media
from llmstack_model_runner.steps.timing import StepTiming
from llmstack_model_runner.steps.warm_up import check_warm_up, for_groups, masked, warm_up
from llmstack_model_runner.weight_updates import WeightUpdates
from llmstack_types import (
    EngineStartError,
    KVCacheSpec,
    ModelRunnerConfig,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
)
from llmstack_types.token_masks import MakeTokenMasks

logger = logging.getLogger(__name__)

_LOWER = "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --num-kv-blocks"
_NUM_PROFILE_TOKENS = 256  # of the temporary storage for the largest steps, before there is a KV cache


class ModelRunnerStateError(RuntimeError):
    """The runner was called before it was ready or after it was shut down."""


class ModelRunner(SamplingByTexts, WeightUpdates):
    """One model on one device; used by one thread.

    The order of calls is `load_model`, `initialize_kv_cache`, `execute_model` and `sleep` or `wake_up`, `shutdown`.

    Attributes:
        timing: Time of the steps so far, by phase.
    """

    def __init__(
        self, config: ModelRunnerConfig, runtime: DeviceRuntime | None = None, sharding: Sharding | None = None
    ) -> None:
        """Stores the configuration; weights are read by `load_model`.

        `runtime` replaces a device's in tests. With a `sharding` it computes one rank's part; failed steps raise.
        """
        self.timing = StepTiming()
        self._sharding = sharding or Sharding()
        self._config = config
        self._sampler = Sampler()
        self._logits_processor_types: list[LogitsProcessorType] = []
        self._device = torch.device("cpu")
        self._runtime = runtime
        self._model: Model | None = None
        self._drafts = Drafts(config, self._device, self._sharding)
        self._makes_drafts = config.makes_drafts
        self._has_device_rows = False
        self._spec: KVCacheSpec | None = None
        self._report = ModelReport()
        self._adapters: AdapterStore | None = None
        self._profiling = Profiling()
        self._layer_reports = LayerReports()
        self._heads = NO_HEADS
        self._kv_caches: KVCaches = []
        self._copies: BlockCopies = DirectBlockCopies([], [])
        self._batch: InputBatch | None = None
        self._steps: HostSteps | DeviceSteps | None = None
        self._media: StepMedia | None = None
        self._recovery = StepRecovery(self._make_room)
        self._blocks = BlockTransfer([], self._recovery, self._device)
        self._num_blocks = (0, 0, 0)

    def load_model(self) -> None:
        """Reads the weights, or generates dummy weights.

        Raises:
            ValueError: The model is not supported; the message is one sentence.
            EngineStartError: A file of the model is missing or damaged; the message is one sentence.
        """
        config = self._config
        self._device = self._runtime.device if self._runtime is not None else own_device(config)
        self._sampler = Sampler(config.logprobs_mode)
        self._logits_processor_types = load_logits_processors(config.logits_processors)
        try:
            self._drafts = Drafts(config, self._device, self._sharding)
            self._drafts.load_model()  # before the served model, which sets threads up
            loaded = load_served_model(config, self._device, self._sharding)
        except ModelFilesError as error:  # the engine core does not depend on llmstack_model_files
            raise EngineStartError(str(error)) from error
        self._model, self._heads, spec, self._adapters, self._report, weight_bytes = loaded
        self._spec = self._drafts.beside(self._model, spec, weight_bytes)
        self._has_device_rows = has_device_rows(self._model, self._device, self._runtime)

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
        other_bytes = media_bytes(config, spec, None if self._model is None else self._model.media_encoder())
        if self._device.type == "cuda":
            share = 1.0 if is_size_given else config.gpu_memory_utilization
            return max(0, self._profile_memory(share).kv_bytes(share) - lost_bytes(spec) - other_bytes)
        return host_kv_bytes_of(config, spec, is_size_given=is_size_given, other_bytes=other_bytes)

    def run_largest_steps(self, most_state_bytes: int = 1 << 62) -> int:
        """Computes the steps that need the most memory with a small temporary storage, and returns its bytes.

        The storage has states of at most `most_state_bytes`, and the steps no more rows than these suffice for.

        Raises:
            EngineStartError: The device has not enough memory for these steps.
        """
        config, spec = self._config, self.kv_cache_spec()
        num_blocks = -(-_NUM_PROFILE_TOKENS // spec.block_size)
        num_rows, num_state_blocks = largest_rows(spec, config.max_num_seqs, most_state_bytes)
        self._allocate(num_blocks, 0, num_state_blocks)
        sizes = (config.max_num_batched_tokens, num_rows, config.max_model_len, spec.block_size)
        steps = list(largest_steps(*sizes, is_generative=spec.is_generative))
        self._hold_positions(num_positions(steps))
        for step in for_groups(steps, spec.table_groups, has_states=spec.state_group is not None):
            check_warm_up(self.execute_model(step).result())
        self._drafts.run_largest()
        self._release_kv_cache()
        return_freed_memory(self._device)  # captured steps contain reference cycles
        return spec.num_cache_bytes(num_blocks + self._has_device_rows, num_state_blocks + self._has_device_rows)

    def _profile_memory(self, share: float) -> MemoryProfile:
        config, spec = self._config, self.kv_cache_spec()
        is_capturing = self._has_device_rows and not config.enforce_eager
        sizes = decode_sizes(most_decode_rows(config), config.cuda_graph_sizes) if is_capturing else []
        probe = CudaMemoryProbe(self._device)
        # As many as the whole device could hold: the steps need tables before it is known what is left for blocks.
        self._hold_positions(max_positions(config, spec, probe.total_bytes // spec.bytes_per_block))
        run_largest = partial(self.run_largest_steps, probe.state().free_bytes)
        profile = profile_memory(probe, run_largest, graph_bytes(sizes, spec.vocab_size))
        for line in profile.table(share, spec.bytes_per_block, spec.block_size, config.max_model_len):
            logger.info("%s", line)
        return profile

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0, num_state_blocks: int = 0) -> None:
        """Allocates KV storage for `num_blocks` blocks and warms up, so that the first request is not slower.

        `num_host_blocks` more blocks in host memory hold swapped-out requests. `num_state_blocks` are those of layers
        with a state, two for each row and the state before the first token at least.
        """
        config, spec = self._config, self.kv_cache_spec()
        self._num_blocks = (num_blocks, num_host_blocks, num_state_blocks)
        steps = self._allocate(*self._num_blocks)
        self._hold_positions(max_positions(config, spec, num_blocks))
        max_num_tokens = min(config.max_num_batched_tokens, config.max_model_len)
        for step in warm_up(spec, num_blocks, max_num_tokens, config.max_num_seqs):
            check_warm_up(self.execute_model(step, masked(step, spec.vocab_size)).result())
            if not self._sharding.is_last_stage and step.scheduled_requests:
                self.append_tokens(None)
        steps.finish_warm_up()
        self.timing.reset()

    def _hold_positions(self, count: int) -> None:
        if self._model is not None:
            self._model.hold_positions(count)

    def _allocate(self, num_blocks: int, num_host_blocks: int, num_state_blocks: int) -> HostSteps | DeviceSteps:
        """Allocates the KV storage and creates the input batch and the steps."""
        config, spec = self._config, self.kv_cache_spec()
        self._recovery = StepRecovery(self._make_room)
        num_device_blocks = num_blocks + self._has_device_rows  # one more, and one more state: those of padding rows
        with allocation(f"a KV cache of {num_device_blocks * spec.bytes_per_block} bytes cannot be allocated", _LOWER):
            storage = allocate_storage(spec, num_device_blocks, self._device)
            states = allocate_states(spec, num_state_blocks + self._has_device_rows, self._device)
        self._kv_caches = self._layer_reports.over(by_layer(storage, spec, states))
        self._blocks = BlockTransfer(block_layers(storage, self._kv_caches, spec), self._recovery, self._device, states)
        self._copies = make_block_copies(storage, spec, num_host_blocks, self._device)
        size = (config.max_num_seqs, spec.vocab_size, self._device)
        rules = [] if self._model is None else self._model.logits_processors(config.max_num_seqs)
        processors = LogitsProcessors([*rules, *(make(*size) for make in self._logits_processor_types)])
        self._batch = InputBatch(
            config.max_num_seqs, config.max_model_len, spec.block_size, num_blocks, spec.vocab_size, processors,
            spec.groups if spec.table_groups else (), self._adapters, num_state_blocks,
        )  # fmt: skip
        self._batch.sampling.texts = self.token_texts
        if self._adapters is not None:
            self._adapters.make_slots(config.max_loras, config.max_num_batched_tokens)
        self._drafts.allocate(self._batch, spec, num_device_blocks)
        self._steps = self._make_steps(self._batch)
        return self._steps

    def execute_model(self, scheduled: SchedulerOutput, token_masks: MakeTokenMasks | None = None) -> PendingOutput:
        """Starts one step: row updates, copies of blocks, work of the encoder, forward pass, sampling.

        `token_masks`, for constrained rows, is called before sampling.

        Raises:
            InputBatchError: The step is inconsistent with the runner's rows.
            MediaWorkError: The step needs parts of items that were not encoded.
            ValueError: A copy names a block that does not exist.
        """
        steps, batch, media = self._steps, self._batch, self._media
        if steps is None or batch is None or media is None:
            raise ModelRunnerStateError("the KV cache is not initialized")
        steps.settle(scheduled)
        with self.timing.prepare:
            step = batch.update(scheduled)
            if scheduled.swap_outs or scheduled.swap_ins or scheduled.block_copies:
                with torch.inference_mode():
                    self._copies.apply(scheduled)
            self._recovery.unwritten.follow(scheduled)
        if scheduled.freed_media or scheduled.encoder_work:
            with self.timing.forward:
                media.follow(scheduled)
        step = step if media.cross is None else media.with_places(step)
        masks: Callable[[], TokenMasks] | None = token_masks
        if self._makes_drafts:
            with self.timing.forward:
                step, masks = self._drafts.fill(scheduled, step, token_masks)
        pending: PendingOutput = SettledStep(ModelRunnerOutput())
        if step.request_ids:
            compute = steps.run if masks is None else PartMasks(step, masks).masked(steps.run)
            run = self._recovery.run if self._sharding.is_whole else self._recovery.run_whole
            pending = run(batch, step, compute, media.find_failures(step) if batch.media else {})
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
        linear layers are computed; `decode`, how small decode steps are; `torch`, its build; `caches`, of a processor.
        """
        model = self._report.entries(self._model)
        if self._steps is not None and self._steps.describe():
            model["decode"] = self._steps.describe()
        return model | backends(self._device.type) | device_report(self._device.type)

    def announce_adapter(self, identity: str, path: str) -> None:
        """Nothing is to be prepared before `read_adapter`."""

    def read_adapter(self, identity: str, path: str) -> object:
        """Reads and checks an adapter for `add_adapter`; in any thread, beside steps.

        Raises:
            ValueError: It cannot be served; the text is one sentence.
        """
        return self._store.read(identity, path)

    def add_adapter(self, identity: str, adapter: object) -> None:
        """Makes what `read_adapter` has returned available to new requests."""
        self._store.add(identity, adapter)

    def remove_adapter(self, identity: str) -> None:
        """Drops an adapter that no request uses."""
        self._store.remove(identity)

    def kv_block_form(self) -> tuple[int, int, str]:
        """Bytes of a block, and of a state, which have the canonical form."""
        return *self._blocks.sizes, ""

    def read_kv_blocks(self, block_ids: Sequence[int], out: memoryview, state_id: int = 0) -> None:
        """Copies blocks into `out`, which it does not keep, and a state behind them unless it is 0.

        Raises:
            ValueError: A block does not exist, or `out` has another size.
        """
        self._blocks.read(block_ids, out, state_id)

    def write_kv_blocks(self, block_ids: Sequence[int], data: memoryview, first: int = 0, state_id: int = 0) -> None:
        """Copies the last blocks of `data`, from number `first` on, into these blocks, then a state unless it is 0.

        Raises:
            ValueError: A block does not exist, or `data` has another size; nothing has been copied.
        """
        self._drafts.forget_blocks(block_ids)
        self._blocks.write(block_ids, data, first, state_id)

    def report_progress_to(self, report: Callable[[], None]) -> None:
        """Calls `report` at each layer of a step that is no replay; on the thread of the step."""
        self._layer_reports.listener = report

    def start_profile(self, *, with_stack: bool, with_memory: bool, record_shapes: bool) -> None:
        """Begins to record all operations; steps take longer meanwhile."""
        self._profiling.start(self._device, with_stack=with_stack, with_memory=with_memory, record_shapes=record_shapes)

    def stop_profile(self, path: str) -> None:
        """Ends the profile and writes it to `path`, for Perfetto; compressed if that ends in `.gz`.

        Raises:
            OSError: The file cannot be written.
            RuntimeError: The profile is damaged.
        """
        self._profiling.stop(path)

    def sleep(self, level: int) -> None:
        """Frees the KV storage and, with level 2, the weights, which `wake_up` then loads again, and all adapters."""
        self._release_kv_cache()
        if level > 1:
            self._model = self._adapters = None  # these refer to the model
            self._heads, self._drafts = NO_HEADS, self._drafts.without_weights()
        return_freed_memory(self._device)

    def wake_up(self) -> None:
        """Restores what `sleep` freed: the same weights, and an empty KV storage of the same size.

        Raises:
            ValueError: The model can no longer be loaded.
        """
        if self._model is None:
            self.load_model()
        self.initialize_kv_cache(*self._num_blocks)

    def shutdown(self) -> None:
        """Releases the device. Idempotent."""
        self._release_kv_cache()
        self._model, self._adapters, self._heads, self._drafts = None, None, NO_HEADS, self._drafts.without_weights()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _make_room(self) -> None:
        if isinstance(self._steps, DeviceSteps):
            self._steps.make_room()
        return_freed_memory(self._device)

    def _release_kv_cache(self) -> None:
        """Frees the KV storage with the rows and captured steps that refer to it."""
        self._batch = self._steps = self._media = None
        self._drafts.release()
        self._copies.close()
        self._copies, self._kv_caches = DirectBlockCopies([], []), []
        self._blocks = BlockTransfer([], self._recovery, self._device)

    @property
    def _store(self) -> AdapterStore:
        if self._adapters is None:
            raise RuntimeError("adapters are not enabled, or the model is not loaded")
        return self._adapters

    def _make_steps(self, batch: InputBatch) -> HostSteps | DeviceSteps:
        if self._model is None:
            raise ModelRunnerStateError("the model is not loaded")
        own = (self._model, self._config, self.kv_cache_spec(), self._device, self._make_room)
        self._media = make_media(batch, *own, is_first=self._sharding.is_first_stage)
        return make_steps(
            self._model, batch, self._kv_caches, self._sampler, self._config, self.timing, self._media.find_vectors,
            device=self._device, runtime=self._runtime, heads=self._heads, sharding=self._sharding,
            adapters=self._adapters, cross=self._media.cross,
        )  # fmt: skip
