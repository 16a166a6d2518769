"""For tests: a driver that is one step ahead, as an engine core that schedules ahead is, and a runner on a twin."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmstack_model_runner.device.twin import CpuTwin
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_types import (
    ModelRunnerConfig,
    ModelRunnerOutput,
    NewRequest,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)


@dataclass
class Request:
    """What a scheduler knows of a request; `num_under_way` of its tokens are sampled by steps not read yet."""

    prompt: list[int]
    params: SamplingParams
    outputs: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    error: str = ""
    num_under_way: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_in_runner: bool = False

    @property
    def num_left(self) -> int:
        """Tokens to compute until the request samples; 1 in a decode."""
        return len(self.prompt) + len(self.outputs) + self.num_under_way - self.num_computed


class AheadDriver:
    """Starts a step, then reads the one before it."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        self.requests: dict[str, Request] = {}
        self._runner = runner
        self._block_size = runner.kv_cache_spec().block_size
        self._free_blocks = list(range(num_blocks))
        self._removed: list[str] = []
        self._under_way: deque[tuple[list[str], Any]] = deque()
        self._num_steps = 0

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        """A request for whichever step names it first."""
        self.requests[name] = Request(prompt, params)

    def is_ready(self, name: str) -> bool:
        """Whether the next step may have the request: one that comes back must bring all its tokens."""
        request = self.requests[name]
        return request.is_in_runner or not request.num_under_way

    def take_row(self, name: str) -> None:
        """Preempts a request, or ends it: the row goes with the next step, which may reuse its blocks."""
        request = self.requests[name]
        if request.is_in_runner:
            self._removed.append(name)
        self._free_blocks += request.blocks
        request.is_in_runner, request.blocks, request.num_computed = False, [], 0

    def step(self, name_to_num_tokens: Mapping[str, int]) -> None:
        """Starts a step with these rows and reads the last one."""
        new = [self._introduce(name) for name in name_to_num_tokens if not self.requests[name].is_in_runner]
        rows = [self._schedule(name, num) for name, num in name_to_num_tokens.items()]
        scheduled = SchedulerOutput(
            self._num_steps, new, rows, self._removed, sum(row.num_scheduled_tokens for row in rows)
        )
        self._under_way.append((list(name_to_num_tokens), self._runner.execute_model(scheduled)))
        self._removed = []
        self._num_steps += 1
        for name in name_to_num_tokens:
            request = self.requests[name]
            request.num_under_way += request.num_left == 0
        self.land(1)

    def land(self, num_left: int = 0) -> None:
        """Reads steps until so many are left."""
        while len(self._under_way) > num_left:
            names, pending = self._under_way.popleft()
            self._take(names, pending.result())

    def _take(self, names: list[str], output: ModelRunnerOutput) -> None:
        for name, token_ids in zip(names, output.sampled_token_ids, strict=True):
            request = self.requests[name]
            request.outputs += token_ids
            request.num_under_way -= bool(token_ids) or name in output.errors
            request.logprobs += output.logprobs.get(name, [])
            request.error = request.error or output.errors.get(name, "")

    def _introduce(self, name: str) -> NewRequest:
        request = self.requests[name]
        request.is_in_runner = True
        return NewRequest(name, request.prompt + request.outputs, len(request.prompt), request.params)

    def _schedule(self, name: str, num_tokens: int) -> ScheduledRequest:
        request = self.requests[name]
        start, known = request.num_computed, len(request.blocks)
        request.num_computed += num_tokens
        while len(request.blocks) * self._block_size < request.num_computed:
            request.blocks.append(self._free_blocks.pop())
        return ScheduledRequest(name, start, num_tokens, request.blocks[known:])


class TwinModelRunner(ModelRunner):
    """A runner on the twin of a device; an engine core finds it by its name, `module:Class`."""

    def __init__(self, config: ModelRunnerConfig) -> None:
        super().__init__(config, CpuTwin())
