"""Protocols of the model runner, hooks and constraint backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from llmstack_types import (
    EngineCoreOutputs,
    KVCacheSpec,
    ModelRunnerOutput,
    RequestEvent,
    SchedulerOutput,
    ShadowReport,
    StepRecord,
    StructuredOutputsParams,
)
from llmstack_types.lifecycle import Closing
from llmstack_types.token_masks import MakeTokenMasks


class PendingOutput(Protocol):
    """A step under way."""

    def result(self) -> ModelRunnerOutput:
        """Waits for the step and returns its results; repeated calls return the same."""
        ...


class ModelRunner(Closing, Protocol):
    """One model on one device. Constructed with a `ModelRunnerConfig` alone; used by one thread."""

    def load_model(self) -> None:
        """Reads or makes the weights.

        Raises:
            ValueError: The model cannot be run; the text says why in one sentence.
        """
        ...

    def kv_cache_spec(self) -> KVCacheSpec:
        """Shape of the KV storage; after `load_model`."""
        ...

    def available_kv_bytes(self, *, is_size_given: bool = False) -> int:
        """Memory that KV storage may take on the device, after the weights and working memory.

        `is_size_given`: The user has said how large it is to be: all that can be had, rather than a sensible share.
        """
        ...

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0, num_state_blocks: int = 0) -> None:
        """Allocates KV storage for `num_blocks` blocks and warms up, so that the first request is not slower.

        `num_host_blocks` further ones lie in the host's memory, for requests that are swapped out; a runner without
        them may leave the argument out. `num_state_blocks` are those of states, where `kv_cache_spec` has a group of
        that kind.
        """
        ...

    def execute_model(self, scheduled: SchedulerOutput, token_masks: MakeTokenMasks | None = None) -> PendingOutput:
        """Starts one step: row updates, copies of blocks, forward pass, sampling. An empty step has the first two.

        `token_masks` comes with steps that have constrained rows. It is called once, when the forward pass is launched,
        and takes its time: masks are computed, or waited for, while the device is busy.

        If the last step is still under way, its tokens are this one's inputs: the runner waits for it, or orders the
        two on its device.
        """
        ...

    def backends(self) -> Mapping[str, str]:
        """Operation to the implementation that runs it."""
        ...

    def sleep(self, level: int) -> None:
        """Gives KV storage back, and with level 2 the weights too; may come again with a higher level.

        No row is left when it comes, and no step follows before `wake_up`.
        """
        ...

    def wake_up(self) -> None:
        """Restores what `sleep` freed: the same weights, and empty KV storage of the same size."""
        ...


class ShadowSource(Protocol):
    """A shadow scheduler: it follows the step log, and reports. Its methods neither wait nor raise."""

    def take(self, segment: bytes, decisions: list[bytes], start_us: int) -> None:
        """A part of the log, with what was decided in it; see `step_log.Follower`."""
        ...

    def take_report(self) -> ShadowReport | None:
        """The last report, once; None where there is no new one."""
        ...

    def close(self) -> None:
        """Ends the shadow and what belongs to it. Idempotent."""
        ...


class ReportingRunner(Protocol):
    """A model runner that reports progress within a step: its methods besides those of `ModelRunner`."""

    def report_progress_to(self, report: Callable[[], None]) -> None:
        """Calls `report` from time to time within a step, also while graphs are captured and kernels compiled."""
        ...


class WatchedRunner(Protocol):
    """A model runner with processes that may end by themselves: its methods besides those of `ModelRunner`."""

    def check_processes(self) -> None:
        """Looks at its processes while there is no step; takes microseconds.

        Raises:
            Exception: Of any kind; it cannot compute a step any more.
        """
        ...


class UpdatingRunner(Protocol):
    """A model runner that changes its weights in place: its methods besides those of `ModelRunner`."""

    def update_weights(self, path: str) -> None:
        """Takes the weights of a folder in place of its own; no row is left. KV storage is empty afterwards.

        Raises:
            ValueError: They do not fit, or cannot be read, and nothing has changed. The text is one sentence.
            WeightsReloadedError: They cannot be loaded: the weights before are, again, and adapters are lost.
        """
        ...


class TextRunner(Protocol):
    """A model runner that samples by the texts of tokens: its methods besides those of `ModelRunner`."""

    def announce_token_texts(self) -> None:
        """Comes before `read_token_texts`, on the engine core's thread."""
        ...

    def read_token_texts(self) -> None:
        """Reads the texts, unless they are in memory; called in another thread than the others, beside steps.

        Raises:
            Exception: Of any kind; they cannot be read.
        """
        ...

    def hold_token_texts(self) -> None:
        """Comes behind `read_token_texts`, on the engine core's thread, before a step needs them.

        Raises:
            ValueError: Another rank cannot read them.
        """
        ...


class ProfilingRunner(Protocol):
    """A model runner that records profiles: its methods besides those of `ModelRunner`."""

    def start_profile(self, *, with_stack: bool, with_memory: bool, record_shapes: bool) -> None:
        """Begins to record all operations; none is being recorded before."""
        ...

    def stop_profile(self, path: str) -> None:
        """Ends the profile and writes it to `path`, compressed if that ends in `.gz`.

        Raises:
            OSError: The file cannot be written.
            RuntimeError: The profile is damaged.
        """
        ...


class AdapterRunner(Protocol):
    """A model runner that serves LoRA adapters: its methods besides those of `ModelRunner`."""

    def announce_adapter(self, identity: str, path: str) -> None:
        """Comes before `read_adapter`, on the engine core's thread."""
        ...

    def read_adapter(self, identity: str, path: str) -> object:
        """Reads and checks an adapter; in any thread, beside steps.

        Raises:
            ValueError: It cannot be served; the text is one sentence.
        """
        ...

    def add_adapter(self, identity: str, adapter: object) -> None:
        """Makes what `read_adapter` has returned available to new requests."""
        ...

    def remove_adapter(self, identity: str) -> None:
        """Drops an adapter that no row has."""
        ...


class TransferRunner(Protocol):
    """A model runner whose KV blocks can leave the process: its methods besides those of `ModelRunner`.

    The form of blocks is the canonical one: for each layer keys, then values, each `[block, kv_head, slot, dim]`.
    """

    def kv_block_form(self) -> tuple[int, int, str]:
        """Bytes of a block, those of a state, and what distinguishes both from the canonical form.

        A state has the tensors of each layer with one; 0 bytes for a model without. Of several ranks, parts follow.
        """
        ...

    def read_kv_blocks(self, block_ids: Sequence[int], out: memoryview, state_id: int = 0) -> None:
        """Copies blocks into `out`, and a state block behind them unless it is 0, after all steps that were started.

        Raises:
            ValueError: A block does not exist, or `out` has another size.
        """
        ...

    def write_kv_blocks(self, block_ids: Sequence[int], data: memoryview, first: int = 0, state_id: int = 0) -> None:
        """Copies the last blocks of `data`, from number `first` on, into the blocks, before all later steps.

        What is behind them goes into the state block `state_id`, unless that is 0.

        Raises:
            ValueError: A block does not exist, or `data` has another size; nothing has been copied.
        """
        ...


class KVTransfer(Protocol):
    """Carries KV blocks from one engine core to another. Has one implementation for each kind of connection.

    Attributes:
        engine_id: By which other engine cores find this one.
    """

    engine_id: str

    def export_blocks(self, tag: bytes, num_bytes: int, fill: Callable[[memoryview], None]) -> str | None:
        """Keeps `num_bytes` bytes, which `fill` writes, for a time; the handle by which they can be imported once.

        None if they would exceed the limits. `tag` says what the bytes are, and whose; an import names an equal one.
        """
        ...

    def import_blocks(self, engine_id: str, transfer_id: str, tag: bytes, num_bytes: int) -> memoryview:
        """The bytes of an export, unharmed; in any thread, and within a time limit.

        Raises:
            KVTransferError: There is none of this handle, tag and size; the text is one sentence.
        """
        ...

    def num_exports(self) -> int:
        """The number of kept exports, without expired ones."""
        ...

    def close(self) -> None:
        """Drops all exports. Idempotent."""
        ...


class EventHook(Protocol):
    """Receives the events of an engine core on its thread, as they happen. It must not block, nor change its arguments.

    An error in it is logged and ends nothing. Methods may be left out.
    """

    def on_status(self, event: RequestEvent) -> None:
        """A request has entered a state; from WAITING on to one of the finished ones."""
        return

    def on_scheduled(self, scheduled: SchedulerOutput) -> None:
        """A step is about to be computed."""
        return

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        """A step is over, with these outputs."""
        return


class ConstraintBackend(Protocol):
    """Compiles constraints, and follows the requests that have one. Constructed with the tokenizer's folder and the
    width of the logits; `compile` may run in several threads, everything else belongs to the engine core's.
    """

    def expected_seconds(self, params: StructuredOutputsParams) -> float:
        """A rough estimate of the seconds to compile a constraint, by its size and shape. From any thread."""
        ...

    def compile(self, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...]) -> None:
        """Compiles a constraint and keeps it for `start`.

        Raises:
            InvalidRequestError: It cannot be compiled.
        """
        ...

    def start(
        self, request_id: str, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...], min_tokens: int = 0
    ) -> None:
        """Begins to follow a request whose constraint has been compiled.

        Before `min_tokens` the text does not end, unless nothing else may follow.
        """
        ...

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Advances a followed request by its new tokens."""
        ...

    def masks(self, rows: Sequence[tuple[str, Sequence[int]]]) -> bytearray:
        """`TokenMasks.bits` for rows of (request id, draft tokens). After an error each row is asked for alone."""
        ...

    def end(self, request_id: str) -> None:
        """Forgets a request that `start` began to follow."""
        ...
