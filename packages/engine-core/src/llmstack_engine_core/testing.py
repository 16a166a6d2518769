"""Test kit: a model runner without a model, and checks of any model runner."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl

from llmstack_engine_core.protocols import ModelRunner
from llmstack_types import (
    KVCacheGroupSpec,
    KVCacheSpec,
    KVTensorSpec,
    ModelRunnerConfig,
    ModelRunnerOutput,
    NewRequest,
    PoolingParams,
    PoolingTask,
    PoolingType,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
    TokenMasks,
)
from llmstack_types.token_masks import MakeTokenMasks

BYTES_PER_TOKEN = 8
ECHO_EMBEDDING_SIZE = 4


@dataclass(frozen=True, slots=True)
class EchoOptions:
    """How an `EchoModelRunner` behaves; written after a `?` in the model path: `echo?step_delay_s=0.1&vocab_size=300`.

    Attributes:
        load_error: Text of the ValueError that `load_model` raises.
        fail_at_step: The step, counted from 1, that raises a RuntimeError.
        exit_at_step: The step that ends the whole process at once.
        deadly_token_id: Saying this token ends the whole process.
        hang_at_step: The step that never ends.
        weights_file: A file whose content stands for the digest of the weights.
        error_request_id: The row of this request fails in its first step.
        num_available_blocks: The blocks for which `available_kv_bytes` reports room.
        is_generative: Whether it pools only, if 0, or generates as well.
        num_labels: How many labels it has, up to 4; their numbers are the first of the vector's.
        sliding_window: Unless 0, it has a second layer with such a window, and block tables for each of the two.
    """

    step_delay_s: float = 0.0
    load_delay_s: float = 0.0
    load_error: str = ""
    fail_at_step: int = 0
    exit_at_step: int = 0
    hang_at_step: int = 0
    deadly_token_id: int = -1
    weights_file: str = ""
    error_request_id: str = ""
    vocab_size: int = 50_257
    num_available_blocks: int = 16_384
    is_generative: int = 1
    num_labels: int = 0
    sliding_window: int = 0

    @classmethod
    def from_model_path(cls, model_path: str) -> EchoOptions:
        """The options after the `?`; none gives the defaults."""
        types: dict[str, Callable[[str], float | int | str]] = {
            name: type(getattr(cls(), name)) for name in cls.__dataclass_fields__
        }
        query = parse_qsl(model_path.partition("?")[2])
        return cls(**{name: types[name](value) for name, value in query})  # type: ignore[arg-type]  # checked by name


@dataclass(slots=True)
class _Row:
    request: NewRequest
    num_block_slots: int = 0


@dataclass(frozen=True, slots=True)
class EchoOutput:
    """A step that was over at once."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """The results of the step."""
        return self.output


@dataclass(slots=True)
class _StepResults:
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    pooled: dict[str, bytes] = field(default_factory=dict)


class EchoModelRunner:
    """A model runner that says the prompt again: the k-th sampled token is prompt token k modulo the prompt's length.

    The vector of a prompt is `echo_vector`.

    It refuses rows that a real runner could not run: unknown ones, and ones whose block table is too short.
    """

    def __init__(self, config: ModelRunnerConfig) -> None:
        self.options = EchoOptions.from_model_path(config.model_path)
        self._block_size = config.block_size
        self._rows: dict[str, _Row] = {}
        self.adapters: list[str] = []
        self._num_steps = self._sleep_level = 0

    def load_model(self) -> None:
        """Waits, in pieces since a signal just before a sleep is handled after it, or fails as the options say."""
        for _ in range(round(self.options.load_delay_s * 100)):
            time.sleep(0.01)
        if self.options.load_error:
            raise ValueError(self.options.load_error)

    def kv_cache_spec(self) -> KVCacheSpec:
        """One layer, or two with groups of their own, with one head of one number."""
        window = self.options.sliding_window
        tensors = tuple(KVTensorSpec(name, (1, self._block_size, 1), "float32") for name in ("keys", "values"))
        both = (KVCacheGroupSpec((0,), tensors=tensors), KVCacheGroupSpec((1,), window, "window", tensors))
        return KVCacheSpec(
            num_layers=2 if window else 1,
            block_size=self._block_size,
            dtype="float32",
            bytes_per_block=BYTES_PER_TOKEN * self._block_size,
            vocab_size=self.options.vocab_size,
            embedding_size=ECHO_EMBEDDING_SIZE,
            is_generative=bool(self.options.is_generative),
            num_labels=self.options.num_labels,
            groups=both if window else both[:1],
        )

    def available_kv_bytes(self, *, is_size_given: bool = False) -> int:
        """Returns room for `num_available_blocks` blocks."""
        return self.options.num_available_blocks * BYTES_PER_TOKEN * self._block_size

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """There is nothing to allocate."""

    def backends(self) -> Mapping[str, str]:
        """Returns one made-up operation."""
        path = self.options.weights_file
        return {"echo": "python", "weights": Path(path).read_text(encoding="utf-8")} if path else {"echo": "python"}

    def announce_adapter(self, identity: str, path: str) -> None:
        """Nothing is to be prepared."""

    def read_adapter(self, identity: str, path: str) -> object:
        """Reads its configuration; under an adapter each echo begins with the prompt's second token."""
        try:
            return (Path(path) / "adapter_config.json").read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{Path(path).name} has no adapter_config.json.") from error

    def add_adapter(self, identity: str, adapter: object) -> None:
        """Notes the adapter, so that a request of another one is an error."""
        self.adapters.append(identity)

    def remove_adapter(self, identity: str) -> None:
        self.adapters.remove(identity)

    def sleep(self, level: int) -> None:
        """Refuses steps from here on; rows must have been removed before."""
        if self._rows:
            raise RuntimeError(f"rows are left: {', '.join(self._rows)}")
        self._sleep_level = level

    def wake_up(self) -> None:
        """Accepts steps again after `sleep`."""
        self._sleep_level = 0

    def shutdown(self) -> None:
        """Forgets the rows of all requests."""
        self._rows.clear()

    def execute_model(self, scheduled: SchedulerOutput, token_masks: MakeTokenMasks | None = None) -> EchoOutput:
        """Applies the row updates and echoes; where that is not allowed, a row says its lowest allowed token."""
        self._num_steps += 1
        self._misbehave()
        if self._sleep_level:
            raise RuntimeError("a step came while the runner was asleep")
        for request_id in scheduled.removed_request_ids:
            self._rows.pop(request_id, None)
        for request in scheduled.new_requests:
            if request.lora_name is not None and request.lora_name not in self.adapters:
                raise RuntimeError(f"the adapter {request.lora_name} is not there")
            self._rows[request.request_id] = _Row(request)
        results = _StepResults()
        masks = {} if token_masks is None else self._masks_of_rows(scheduled, token_masks())
        for row in scheduled.scheduled_requests:
            self._execute_row(row, results, masks.get(row.request_id, ()))
        return EchoOutput(
            ModelRunnerOutput(
                [row.request_id for row in scheduled.scheduled_requests],
                results.sampled_token_ids,
                results.logprobs,
                results.prompt_logprobs,
                results.errors,
                results.pooled,
            )
        )

    def _misbehave(self) -> None:
        if self.options.step_delay_s:
            time.sleep(self.options.step_delay_s)
        if self._num_steps == self.options.hang_at_step:
            threading.Event().wait()
        if self._num_steps == self.options.exit_at_step:
            os._exit(3)
        if self._num_steps == self.options.fail_at_step:
            raise RuntimeError(f"step {self._num_steps} fails, as the options say")

    def _masks_of_rows(self, scheduled: SchedulerOutput, masks: TokenMasks) -> dict[str, list[bytes]]:
        num_drafts = {row.request_id: len(row.draft_token_ids) for row in scheduled.scheduled_requests}
        size = -(-self.options.vocab_size // 32) * 4
        rest = iter([bytes(masks.bits[start : start + size]) for start in range(0, len(masks.bits), size)])
        return {one: [next(rest) for _ in range(1 + num_drafts[one])] for one in masks.request_ids}

    def _execute_row(self, scheduled: ScheduledRequest, results: _StepResults, masks: Sequence[bytes]) -> None:
        request_id, num_computed, num_scheduled, new_block_ids, drafts = scheduled
        row = self._rows[request_id]
        request = row.request
        num_tokens = len(request.token_ids)
        end = num_computed + num_scheduled - len(drafts)
        num_groups = 2 if self.options.sliding_window else 1
        row.num_block_slots += len(new_block_ids) // num_groups * self._block_size
        if not num_computed < end <= num_tokens or end + len(drafts) > row.num_block_slots:
            raise ValueError(f"row {request_id} has {num_tokens} tokens and {row.num_block_slots} slots, not {end}")
        params, num_prompt_tokens = request.sampling_params, request.num_prompt_tokens
        if params.prompt_logprobs is not None and num_computed < num_prompt_tokens - 1:
            positions = range(num_computed + 1, min(end, num_prompt_tokens - 1) + 1)
            results.prompt_logprobs[request_id] = [
                fake_logprobs(request.token_ids[position], params.prompt_logprobs) for position in positions
            ]
        if request_id == self.options.error_request_id:
            results.errors[request_id] = "the row fails, as the options say"
        if request.pooling_params is not None and end == num_tokens and request_id not in results.errors:
            results.pooled[request_id] = self._pool(request.token_ids, request.pooling_params)
        if end < num_tokens or request.pooling_params is not None:
            results.sampled_token_ids.append([])
            return
        # For a row that fails too: the next step may be scheduled for it already.
        sampled = _echo(request, drafts, masks)
        if self.options.deadly_token_id in sampled:
            os._exit(3)
        if request_id in results.errors:
            results.sampled_token_ids.append([])
            return
        results.sampled_token_ids.append(sampled)
        if params.logprobs is not None:
            results.logprobs[request_id] = [fake_logprobs(token_id, params.logprobs) for token_id in sampled]

    def _pool(self, token_ids: list[int], params: PoolingParams) -> bytes:
        if params.task is PoolingTask.CLASSIFY:
            params = PoolingParams(dimensions=self.options.num_labels)
        return echo_vector(token_ids, params)


def _echo(request: NewRequest, draft_token_ids: Sequence[int], masks: Sequence[bytes]) -> list[int]:
    """The next token, and one more for each draft that was right; they are the request's from now on."""
    token_ids, num_prompt_tokens, sampled = request.token_ids, request.num_prompt_tokens, list[int]()
    for place, draft_token_id in enumerate([*draft_token_ids, None]):
        shift = request.lora_name is not None
        token_id = token_ids[(len(token_ids) - num_prompt_tokens + shift) % num_prompt_tokens]
        if masks and not _is_allowed(masks[place], token_id):
            token_id = next(other for other in range(8 * len(masks[place])) if _is_allowed(masks[place], other))
        sampled.append(token_id)
        token_ids.append(token_id)
        if sampled[-1] != draft_token_id:
            break
    return sampled


def _is_allowed(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def echo_vector(token_ids: Sequence[int], params: PoolingParams) -> bytes:
    """The prompt's length, first, greatest and last token, as far as `dimensions` goes; float32, little-endian."""
    numbers = (len(token_ids), token_ids[0], max(token_ids), token_ids[-1])[: params.dimensions]
    return struct.pack(f"<{len(numbers)}f", *numbers)


def fake_logprobs(token_id: int, num_logprobs: int) -> TokenLogprobs:
    """The token and `num_logprobs` others, each half as likely as the one before."""
    token_ids = (token_id, token_id, *range(num_logprobs - 1))[: 1 + max(num_logprobs, 0)]
    return TokenLogprobs(token_ids, tuple(-0.5 * max(index, 1) for index in range(len(token_ids))), rank=1)


def check_model_runner(
    factory: Callable[[], ModelRunner], prompt_token_ids: tuple[int, ...] = (5, 3, 9, 2, 8, 1, 7)
) -> None:
    """Runs a model runner through what the engine core asks of one.

    Args:
        factory: Makes a fresh runner whose configuration allows four rows and the prompt in one step.
        prompt_token_ids: Valid ids of the model, at least four.

    Raises:
        AssertionError: It does not keep to the protocol; the text says where.
    """
    runner = factory()
    runner.load_model()
    spec = runner.kv_cache_spec()
    _require(min(spec.block_size, spec.bytes_per_block, spec.vocab_size) > 0, "the KV cache specification is positive")
    _require(runner.available_kv_bytes() >= spec.bytes_per_block, "there is room for a block")
    _require(runner.available_kv_bytes(is_size_given=True) >= spec.bytes_per_block, "there is room for a block")
    blocks_per_request = -(-(len(prompt_token_ids) + 4) // spec.block_size) * max(len(spec.table_groups), 1)
    runner.initialize_kv_cache(1 + 4 * blocks_per_request)
    _require(isinstance(runner.backends(), Mapping), "backends is a mapping")
    probe = _Probe(runner, list(prompt_token_ids), blocks_per_request)
    whole = probe.generate("whole", 0, [len(prompt_token_ids)])
    chunked = probe.generate("chunked", 1, [2, len(prompt_token_ids) - 2])
    _require(whole == chunked, "a prefill in chunks gives the same greedy tokens as a whole one")
    _require(all(0 <= token < spec.vocab_size for token in whole), "sampled tokens lie below the vocabulary's size")
    empty = runner.execute_model(SchedulerOutput(probe.step, removed_request_ids=["whole", "chunked"]))
    _require(empty.result().request_ids == [], "an empty step has no rows")
    _require(probe.generate("whole", 2, [len(prompt_token_ids)]) == whole, "a removed row's id can be used again")
    if spec.embedding_size:
        vectors = probe.pool("pooled", 3, [2, len(prompt_token_ids) - 2])
        _require(vectors[0] is None, "a chunk of a prompt returns no vector")
        _require(len(vectors[1] or b"") == 4 * spec.embedding_size, "a vector is as wide as the specification says")
    rows = ["whole", "pooled"] if spec.embedding_size else ["whole"]
    for level in (1, 2):
        runner.execute_model(SchedulerOutput(probe.step, removed_request_ids=rows)).result()
        runner.sleep(level)
        runner.wake_up()
        rows = [f"awake {level}"]
        again = probe.generate(rows[0], 0, [len(prompt_token_ids)])
        _require(again == whole, "it computes the same after having slept")
    runner.shutdown()
    runner.shutdown()


@dataclass(slots=True)
class _Probe:
    runner: ModelRunner
    prompt_token_ids: list[int]
    blocks_per_request: int
    step: int = 0

    def generate(self, request_id: str, place: int, chunks: list[int]) -> list[int]:
        """Greedy tokens of one request whose prompt comes in `chunks`, followed by two decode steps."""
        prompt = list(self.prompt_token_ids)
        request = NewRequest(request_id, prompt, len(prompt), SamplingParams(temperature=0.0, max_tokens=4, seed=0))
        block_ids = self._block_ids(place)
        sampled: list[int] = []
        num_computed = 0
        for num_scheduled in [*chunks, 1, 1]:
            row = ScheduledRequest(request_id, num_computed, num_scheduled, [] if num_computed else block_ids)
            scheduled = SchedulerOutput(self.step, [] if num_computed else [request], [row], [], num_scheduled)
            pending = self.runner.execute_model(scheduled)
            output = pending.result()
            _require(output == pending.result(), "result gives the same again")
            _require(output.request_ids == [request_id], "the output has one entry per row")
            num_computed += num_scheduled
            self.step += 1
            is_sampling = num_computed >= len(self.prompt_token_ids)
            _require(len(output.sampled_token_ids[0]) == is_sampling, "a row samples when it reaches its last token")
            sampled += output.sampled_token_ids[0]
        return sampled

    def pool(self, request_id: str, place: int, chunks: list[int]) -> list[bytes | None]:
        """The result of each of the `chunks` of one pooling request."""
        prompt, params = list(self.prompt_token_ids), SamplingParams(temperature=0.0, max_tokens=0, seed=0)
        pooling_params = PoolingParams(PoolingType.MEAN, normalize=True, task=PoolingTask.EMBED)
        request = NewRequest(request_id, prompt, len(prompt), params, pooling_params=pooling_params)
        vectors, num_computed = [], 0
        for num_scheduled in chunks:
            row = ScheduledRequest(
                request_id, num_computed, num_scheduled, [] if num_computed else self._block_ids(place)
            )
            scheduled = SchedulerOutput(self.step, [] if num_computed else [request], [row], [], num_scheduled)
            output = self.runner.execute_model(scheduled).result()
            _require(output.sampled_token_ids == [[]], "a row that pools samples nothing")
            vectors.append(output.pooled.get(request_id))
            num_computed += num_scheduled
            self.step += 1
        return vectors

    def _block_ids(self, place: int) -> list[int]:
        return [1 + place * self.blocks_per_request + index for index in range(self.blocks_per_request)]


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(f"not so: {text}")
