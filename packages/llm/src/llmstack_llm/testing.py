"""Test doubles: an engine core that echoes, and a small model folder."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llmstack_types import (
    Control,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineReady,
    FinishReason,
    Operation,
    PoolingParams,
    PoolingTask,
    SchedulerStats,
    StepRecording,
    TokenLogprobs,
)
from llmstack_types.control import ArgumentTs, ResultT

END_OF_TEXT = "<|endoftext|>"
FAKE_EMBEDDING_SIZE = 4


def byte_tokenizer(special_tokens: Sequence[str] = (END_OF_TEXT,)) -> Tokenizer:
    """A byte-level tokenizer without merges: ids 0 to 255 are bytes (in ByteLevel's order), then the specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer


def write_model_folder(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    chat_template: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Writes a GPT-2-shaped folder without weights: config, byte tokenizer, and what is given; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 257, "n_positions": 128,
        "n_embd": 8, "n_layer": 1, "n_head": 2, "eos_token_id": 256, "bos_token_id": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(facts | (config or {})))
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


@dataclass(slots=True)
class _EchoState:
    request: EngineCoreRequest
    num_output_tokens: int = 0


def _fake_logprobs(token_id: int, num_logprobs: int, named: Sequence[int] = ()) -> TokenLogprobs:
    token_ids = (token_id, *(one for one in named if one != token_id), *range(num_logprobs))
    return TokenLogprobs(token_ids, tuple(-0.5 - index for index in range(len(token_ids))), rank=1)


def fake_vector(token_ids: Sequence[int], dimensions: int | None = None) -> bytes:
    """The prompt's length, first, greatest and last token, as far as `dimensions` goes; float32, little-endian."""
    numbers = (len(token_ids), token_ids[0], max(token_ids), token_ids[-1])[:dimensions]
    return struct.pack(f"<{len(numbers)}f", *numbers)


@dataclass(slots=True)
class EchoEngine:
    """The echo: each step gives every request one token, the k-th being prompt token k mod its length.

    Attributes:
        output_token_ids: The tokens to return instead of the echo; end of sequence does not apply then; None echoes.
        num_labels: How many of a vector's numbers the labels of a prompt get.
        failing_request_ids: Requests that end with `FinishReason.ERROR` at their first step.
    """

    output_token_ids: Sequence[int] | None = None
    num_labels: int = 1
    failing_request_ids: set[str] = field(default_factory=set)
    request_id_to_state: dict[str, _EchoState] = field(default_factory=dict)
    num_steps: int = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        self.request_id_to_state[request.request_id] = _EchoState(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.request_id_to_state.pop(request_id, None)

    def step(self) -> EngineCoreOutputs:
        """One token for each request."""
        self.num_steps += 1
        outputs = [self._output(state) for state in list(self.request_id_to_state.values())]
        for output in outputs:
            if output.finish_reason is not None:
                del self.request_id_to_state[output.request_id]
        stats = SchedulerStats(step=self.num_steps, num_running=len(self.request_id_to_state), num_blocks=64)
        return EngineCoreOutputs(outputs, time.monotonic(), stats)

    def _output(self, state: _EchoState) -> EngineCoreOutput:
        request, params = state.request, state.request.sampling_params
        if request.request_id in self.failing_request_ids:
            return EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error="made to fail")
        if request.pooling_params is not None:
            vector = self._pool(request.prompt_token_ids, request.pooling_params)
            return EngineCoreOutput(
                request.request_id, [], finish_reason=FinishReason.STOP, num_cached_tokens=0, pooled=vector
            )
        said = self.output_token_ids if self.output_token_ids is not None else request.prompt_token_ids
        token_id = said[state.num_output_tokens % len(said)]
        is_first = state.num_output_tokens == 0
        state.num_output_tokens += 1
        finish_reason, stop_reason = self._finish(state, token_id)
        prompt_logprobs = None
        if is_first and params.prompt_logprobs is not None:
            num = params.prompt_logprobs
            prompt_logprobs = [None, *(_fake_logprobs(token, num) for token in request.prompt_token_ids[1:])]
        return EngineCoreOutput(
            request.request_id,
            [token_id],
            logprobs=None
            if params.logprobs is None
            else [_fake_logprobs(token_id, params.logprobs, params.logprob_token_ids or ())],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=0 if is_first else -1,
        )

    def _pool(self, token_ids: Sequence[int], params: PoolingParams) -> bytes:
        task = params.task or PoolingTask.EMBED
        size = self.num_labels if task.gives_labels else params.dimensions
        if task.is_per_token:
            return b"".join(fake_vector([token_id], size) for token_id in token_ids)
        return fake_vector(token_ids, size)

    def _finish(self, state: _EchoState, token_id: int) -> tuple[FinishReason | None, int | None]:
        params = state.request.sampling_params
        if state.num_output_tokens >= params.min_tokens:
            if token_id in state.request.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP, None
            if token_id in (params.stop_token_ids or ()):
                return FinishReason.STOP, token_id
        if params.max_tokens is not None and state.num_output_tokens >= params.max_tokens:
            return FinishReason.LENGTH, None
        return None, None


class FakeEngineCoreClient:
    """An `AsyncEngineCoreClient` over `EchoEngine`, in this process.

    Attributes:
        engine: Its state, free to look at and to change.
        added: Every request it was sent.
        aborted_request_ids: Every id that was aborted.
        step_delay_s: How long each step takes.
        sleep_level: The level that `sleep` has set.
    """

    num_unmoved_requests = num_finishing = 0
    is_exchanging = False

    def __init__(self, ready: EngineReady | None = None, *, engine: EchoEngine | None = None, is_ready: bool = True):
        self.ready = ready or EngineReady(64, 16, 128, 257, "float32", "cpu", embedding_size=FAKE_EMBEDDING_SIZE)
        self.engine = engine or EchoEngine()
        self.added: list[EngineCoreRequest] = []
        self.aborted_request_ids: list[str] = []
        self.step_delay_s = 0.0
        self.is_shut_down = False
        self.sleep_level = 0
        self.is_recovering = False
        self.num_restarts = 0
        self._is_dead = False
        self._has_work = asyncio.Event()
        self._readiness = asyncio.Event()
        self._operations: dict[Operation[Any, *tuple[Any, ...]], Callable[..., Any]] = {
            Control.RESET_PREFIX_CACHE: lambda: not self.engine.request_id_to_state,
            Control.STATS: SchedulerStats,
            Control.RECENT_STEPS: lambda after_step: StepRecording(time.monotonic(), (), ()),
            Control.STEP_LOG: bytes,
            Control.SLEEP: self._sleep,
            Control.WAKE_UP: self._wake_up,
            Control.RELEASE_SESSIONS: lambda tenant, name: (0, 0),
            Control.SLEEP_LEVEL: lambda: self.sleep_level,
            Control.START_PROFILE: str,
            Control.STOP_PROFILE: str,
        }
        if is_ready:
            self._readiness.set()

    def become_ready(self) -> None:
        self._readiness.set()

    def die(self) -> None:
        """Ends the engine core, as a crash would."""
        self._is_dead = True
        self._has_work.set()
        self._readiness.set()

    @property
    def is_dead(self) -> bool:
        return self._is_dead

    async def wait_until_ready(self) -> EngineReady:
        await self._readiness.wait()
        self._check()
        return self.ready

    async def add_request(self, request: EngineCoreRequest) -> None:
        self._check()
        self.added.append(request)
        self.engine.add_request(request)
        self._has_work.set()

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.aborted_request_ids.extend(request_ids)
        self.engine.abort_requests(request_ids)

    async def get_outputs(self) -> EngineCoreOutputs:
        """One step, as soon as there is work."""
        while True:
            await self._has_work.wait()
            await asyncio.sleep(self.step_delay_s)
            self._check()
            if self.engine.request_id_to_state:
                return self.engine.step()
            self._has_work.clear()

    @property
    def engines(self) -> list[EngineReady]:
        return [self.ready]

    async def call(
        self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs, engine_index: int | None = None
    ) -> ResultT:
        """Answers as an engine core does that records no steps."""
        self._check()
        result: ResultT = self._operations[operation](*arguments)
        return result

    def _sleep(self, level: int) -> bool:
        if self.engine.request_id_to_state:
            return False
        self.sleep_level = level
        return True

    def _wake_up(self) -> bool:
        self.sleep_level = 0
        return True

    async def shutdown(self) -> None:
        self.is_shut_down = True

    def _check(self) -> None:
        if self._is_dead:
            raise EngineDeadError("the engine core is gone")
