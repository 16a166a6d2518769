"""Driver that starts a step before it reads the last one, as asynchronous scheduling does."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_types import (
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
    lora_name: str | None = None
    outputs: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    error: str = ""
    num_under_way: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_in_runner: bool = False
    taken_at: int = -1  # the first step that it was to do without its row

    @property
    def num_left(self) -> int:
        """Tokens to compute until the request samples; 1 in a decode."""
        return len(self.prompt) + len(self.outputs) + self.num_under_way - self.num_computed


class AheadDriver:
    """Starts a step, then reads the one before it."""

    def __init__(self, runner: ModelRunner, num_blocks: int, max_num_unread: int = 1) -> None:
        """`max_num_unread`: Steps that are read later; 0 reads each as it is started."""
        self.requests: dict[str, Request] = {}
        self._runner = runner
        self._max_num_unread = max_num_unread
        self._block_size = runner.kv_cache_spec().block_size
        self._free_blocks = list(range(num_blocks))
        self._removed: list[str] = []
        self._under_way: deque[tuple[list[str], Any]] = deque()
        self._num_steps = 0

    def add(self, name: str, prompt: list[int], params: SamplingParams, lora_name: str | None = None) -> None:
        """A request for whichever step names it first."""
        self.requests[name] = Request(prompt, params, lora_name)

    def is_ready(self, name: str) -> bool:
        """Whether the next step may contain the request; a resumed one needs all its tokens, including unread ones."""
        request = self.requests[name]
        return request.is_in_runner or request.taken_at < self._num_steps

    def take_row(self, name: str) -> None:
        """Preempts a request, or ends it: the row goes with the next step, which may reuse its blocks."""
        request = self.requests[name]
        if request.is_in_runner:
            self._removed.append(name)
        self._free_blocks += request.blocks
        request.is_in_runner, request.blocks, request.num_computed = False, [], 0
        request.taken_at = self._num_steps

    def step(self, name_to_num_tokens: Mapping[str, int]) -> None:
        """Starts a step with these rows and reads the last one, or as many as are too many."""
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
        self.land(self._max_num_unread)

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
        tokens, num_prompt_tokens = request.prompt + request.outputs, len(request.prompt)
        return NewRequest(name, tokens, num_prompt_tokens, request.params, lora_name=request.lora_name)

    def _schedule(self, name: str, num_tokens: int) -> ScheduledRequest:
        request = self.requests[name]
        start, known = request.num_computed, len(request.blocks)
        request.num_computed += num_tokens
        while len(request.blocks) * self._block_size < request.num_computed:
            request.blocks.append(self._free_blocks.pop())
        return ScheduledRequest(name, start, num_tokens, request.blocks[known:])


def play(seed: int, driver: AheadDriver, max_num_seqs: int, *, num_steps: int = 40, vocab_size: int = 97) -> None:
    """Anything a scheduler may do: arrivals, chunks, decodes of some rows, preemptions, ends, steps without rows.

    What is done depends on the seed, not on the tokens that come.
    """
    draw, names, running = random.Random(seed), count(), list[str]()
    for _ in range(num_steps):
        if len(running) < max_num_seqs and draw.random() < 0.6:
            running.append(f"request-{next(names)}")
            prompt = draw.choices(range(vocab_size), k=draw.choice([1, 2, draw.randint(3, 30)]))
            driver.add(running[-1], prompt, _random_params(draw))
        chosen = [name for name in running if draw.random() < 0.9 and driver.is_ready(name)]
        lefts = {name: driver.requests[name].num_left for name in chosen}
        driver.step({name: draw.choice([left, left, draw.randint(1, left)]) for name, left in lefts.items()})
        if running and draw.random() < 0.15:
            driver.take_row(draw.choice(running))
        for name in list(running):
            request = driver.requests[name]
            if len(request.outputs) + request.num_under_way >= 20 or draw.random() < 0.03:
                driver.take_row(name)
                running.remove(name)
    driver.land()


_PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 0.4, "min_tokens": 4, "stop_token_ids": (1, 2, 3)},
    {"temperature": 1.0, "logprobs": 2},
    # The host samples for these.
    {"temperature": 1.0, "typical_p": 0.8, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {6: 1.0}, "frequency_penalty": 2.0, "repetition_penalty": 2.0},
    {"temperature": 0.0, "logit_bias": {5: 3.0}, "bad_words_token_ids": ((7, 8), (9,))},
)


def _random_params(draw: random.Random) -> SamplingParams:
    return SamplingParams(seed=draw.randrange(50), **draw.choice(_PARAMS))
