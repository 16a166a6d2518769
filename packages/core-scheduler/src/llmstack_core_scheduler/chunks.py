"""How much of a prompt one row computes."""

from __future__ import annotations

from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.encoding import Encoding
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.state_rows import make_state_rows
from llmstack_core_scheduler.step_plan import StepPlan


class Chunks:
    """Ends chunks where the model asks for it: before an item that is not encoded, and where a state is kept.

    Attributes:
        states: The states of rows; None for a model without any.
    """

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, encoding: Encoding | None) -> None:
        """Begins a run.

        Raises:
            ValueError: Items must not be cut, and states ask for that.
        """
        self.states = make_state_rows(manager, config.state_snapshot_interval)
        if self.states is not None and config.media is not None and config.media.is_atomic:
            raise ValueError("layers with a state exclude items that are computed in one step")
        self._encoding = encoding
        self._can_cut = config.enable_chunked_prefill

    def cut(self, request: Request, start: int, num_tokens: int, plan: StepPlan) -> int:
        """How many of the request's next `num_tokens` tokens, from `start` on, a row of the step computes.

        0 only where it waits for the encoder.
        """
        if self._encoding is not None and start < request.media_end:
            num_ready = self._encoding.ready_tokens(request, start, num_tokens, plan)
            num_tokens = num_ready if self._can_cut or num_ready == num_tokens else 0
        if self.states is not None and num_tokens:
            return self.states.cut(request, start, num_tokens)
        return num_tokens
