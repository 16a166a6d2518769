"""Sizes of chunks: the tokens of a prompt that one row computes in a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llmstack_core_scheduler.block_needs import BlockNeeds
from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.encoding import Encoding
from llmstack_core_scheduler.prompt_pace import make_prompt_pace
from llmstack_core_scheduler.prompt_turns import make_prompt_turns
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.state_rows import make_state_rows
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_core_scheduler.step_times import StepTimes
from llmstack_core_scheduler.waiting_queue import WaitingQueue
from llmstack_types import SchedulerOutput


class Chunks:
    """Ends chunks where others go first or the time is up, before an item not encoded, and where a state is kept.

    Attributes:
        states: The states of rows; None for a model without any.
        turns: Whose turn it is among prompts; None where they go by rank alone.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        encoding: Encoding | None,
        needs: BlockNeeds,
        waiting: WaitingQueue,
    ) -> None:
        """Begins a run.

        Raises:
            ValueError: Items must not be cut, or turns are asked for, and the model has states.
        """
        self._times = StepTimes()
        self._pace = make_prompt_pace(config, self._times)
        self.turns = make_prompt_turns(config, manager, needs, waiting, self._times, self._pace)
        self.states = make_state_rows(manager, config.state_snapshot_interval)
        if self.states is not None and config.media is not None and config.media.is_atomic:
            raise ValueError("layers with a state exclude items that are computed in one step")
        self._encoding = encoding
        self._can_cut = config.enable_chunked_prefill
        self._is_atomic = config.media is not None and config.media.is_atomic

    def cut(self, request: Request, start: int, num_tokens: int, plan: StepPlan) -> int:
        """The number of the request's next `num_tokens` tokens, from `start` on, that a row of the step computes.

        0 where it waits for the encoder, or the step has no time for it.
        """
        if self._encoding is not None and start < request.media_end:
            num_ready = self._encoding.ready_tokens(request, start, num_tokens, plan)
            num_tokens = num_ready if self._can_cut or num_ready == num_tokens else 0
        if self.turns is not None and start >= request.media_end:
            num_tokens = self.turns.begin_row(request, start, num_tokens, plan)
        # Behind the encoder: a prompt that waits for an item takes no time from others.
        if self._pace is not None and num_tokens and not (self._is_atomic and start < request.media_end):
            num_tokens = self._pace.cut(request, start, num_tokens)
        if self.states is not None and num_tokens:
            return self.states.cut(request, start, num_tokens)
        return num_tokens

    def begin_step(self, running: Iterable[Request], has_waiting: bool) -> None:
        """Begins a step of the requests that run, and of waiting ones that it may admit."""
        if self._pace is not None:
            self._pace.begin_step(running, has_waiting)

    def has_time(self) -> bool:
        """Whether the step has time left for prompts."""
        return self._pace is None or not self._pace.is_full

    def observe(self, scheduled: SchedulerOutput, start_s: float, end_s: float) -> None:
        """Learns how long a step has taken."""
        if self._pace is not None or self.turns is not None:
            self._times.observe(scheduled, start_s, end_s)

    def state(self) -> list[Any]:
        """The data from which the time of a step is predicted, as plain values."""
        if self._pace is None and self.turns is None:
            return []
        return [*self._times.state(), self._pace is not None and self._pace.has_prompts]

    def restore(self, state: Sequence[Any], turns: Sequence[int]) -> None:
        """The inverse of `state`, and of that of the turns, for one with the same configuration."""
        if state:
            *times, has_prompts = state
            self._times.restore(times)
            if self._pace is not None:
                self._pace.has_prompts = has_prompts
        if self.turns is not None:
            self.turns.restore(turns)
