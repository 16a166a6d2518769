"""The limits and choices of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from llmstack_core_scheduler.request_queue import POLICIES
from llmstack_core_scheduler.speculative_config import SpeculativeConfig, check_integers
from llmstack_types import MediaSpec
from llmstack_types.engine_settings import SchedulerSettings, StageSettings, StepSettings
from llmstack_types.options import check_ranges

NUM_STEPS_OF_WORK = 16
"""Steps that the remaining tokens are cut into. With two stages, 16 equal steps take the time of 17: 6 % are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulerSettings, StepSettings, StageSettings):
    """Limits of one scheduler; constructing it checks them.

    Attributes:
        max_num_batched_tokens: Most tokens in one step; with fewer than `max_num_seqs`, as many requests run at most.
        max_model_len: Most tokens of one request, prompt and output together.
        policy: Who goes first: `fcfs` (by arrival), `priority` (lower number first, then by arrival) `fair` (tenants in
            turn, by arrival within each) or `deadline` (tenants in turn, the earliest deadline first within each).
        max_prefill_tokens: Most prompt tokens that requests together may have in one step. More would delay the first
            tokens of the first ones without a higher rate. A longer prompt is alone in its steps; 0 is no such limit.
        num_lookahead_slots: Most draft tokens of one row, of a source of drafts that the scheduler is given.
        max_num_preemptions: How often a request may lose its row before it is protected.
        min_stage_tokens: With several stages, steps take a sixteenth of the tokens that are left when the first of
            them begins, and at least so many: only one stage has work in the first and the last one. 0 is no limit.
        max_loras: Most distinct adapters among the requests that run; 0 is no such limit.
        max_itl_ms: Milliseconds of a step beside running streams, as predicted: chunks of prompts are cut so that it
            takes no longer. 0 is no such limit.
        max_itl_steps: The same limit in predicted steps of the streams alone, above 1; 0 is no such limit. Beyond three
            of them a step is only as long as makes what each step costs a seventh of it.
        speculative: Which drafts the scheduler makes itself; None makes none.
        media: What the model takes besides tokens; None for tokens only.

    Raises:
        ValueError: A field is out of range, or two contradict each other; the text names them.
    """

    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    policy: str = "fcfs"
    max_prefill_tokens: int = 0
    num_lookahead_slots: int = 0
    max_num_preemptions: int = 4
    max_itl_ms: float = 0.0
    max_itl_steps: float = 0.0
    speculative: SpeculativeConfig | None = None
    min_stage_tokens: int = 0
    max_loras: int = 0
    media: MediaSpec | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        check_integers(self, ("max_num_batched_tokens", "max_model_len", "max_num_preemptions"), 1)
        check_integers(self, ("num_lookahead_slots", "max_loras", "max_prefill_tokens", "min_stage_tokens"), 0)
        if self.policy not in tuple(POLICIES):  # a list is no key of a mapping
            raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, got {self.policy!r}")
        if self.speculative is not None and self.num_lookahead_slots:
            raise ValueError("num_lookahead_slots must be 0 where speculative says how many draft tokens a row has")
        if self.pipeline_parallel_size > 1 and self.max_num_drafts:
            size = self.pipeline_parallel_size
            raise ValueError(f"pipeline_parallel_size {size} and drafts exclude each other: drafts need one stage")
        self._check_pace()
        if self.shorter_prompts_first:
            self._check_turns()
        if not self.enable_chunked_prefill:
            self._check_whole_prompts()
        if self.media is not None and self.media.is_atomic:
            self._check_whole_items(max(self.media.max_num_tokens.values(), default=0))

    def _check_pace(self) -> None:
        for name, least in (("max_itl_ms", 0.0), ("max_itl_steps", 1.0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not (value == 0 or least < value < float("inf")):
                raise ValueError(f"{name} must be 0 or a number above {least:g}, got {value!r}")
        if self.max_itl_ms and self.max_itl_steps:
            raise ValueError("max_itl_ms and max_itl_steps exclude each other: both are the limit of the same time")
        if self.max_itl_ms or self.max_itl_steps:
            if self.pipeline_parallel_size > 1:
                raise ValueError("a limit of a step's time needs one stage: with several, steps overlap")
            if not self.enable_chunked_prefill:
                raise ValueError("a limit of a step's time needs enable_chunked_prefill: it cuts prompts")

    def _check_turns(self) -> None:
        """Other policies order requests by more than their arrival, which a shorter prompt must not go before."""
        if self.policy not in ("fcfs", "fair"):
            raise ValueError(f"shorter_prompts_first needs the policy fcfs or fair, got {self.policy!r}")
        if self.pipeline_parallel_size > 1:
            raise ValueError("shorter_prompts_first needs one stage: with several, each step has some of the requests")
        if not self.enable_chunked_prefill:
            raise ValueError("shorter_prompts_first needs enable_chunked_prefill: it cuts prompts")

    def _check_whole_items(self, num_tokens: int) -> None:
        """An item is computed in one step, beside a token of each other request that runs."""
        least = num_tokens + self.max_num_seqs - 1
        if self.max_num_batched_tokens < least:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least {least}: this model computes "
                f"an item of {num_tokens} tokens in one step, beside {self.max_num_seqs} requests"
            )
        for name in ("long_prefill_token_threshold", "min_stage_tokens"):
            if 0 < getattr(self, name) < num_tokens:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 0 or at least {num_tokens}, the largest item")

    def _check_whole_prompts(self) -> None:
        if self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({self.max_model_len}) when enable_chunked_prefill is off: a prompt has to fit into one step"
            )
        if self.long_prefill_token_threshold:
            raise ValueError("long_prefill_token_threshold must be 0 when enable_chunked_prefill is off")

    @property
    def has_small_steps(self) -> bool:
        """Whether prompts are cut so that all stages have work soon."""
        return self.pipeline_parallel_size > 1 and self.min_stage_tokens > 0 and self.enable_chunked_prefill

    def stage_tokens(self, last: int, num_left_tokens: int) -> int:
        """The size of the next small step, of so many tokens that are left; `last` was that of the step before.

        Steps stay as large as they are: smaller ones at the end would read the weights more often, and the time of two
        stages depends on the largest step alone.
        """
        share = max(last, num_left_tokens // NUM_STEPS_OF_WORK)
        return max(self.min_stage_tokens, min(num_left_tokens, share))

    def step_tokens(self, num_running: int, stage_tokens: int) -> int:
        """Most tokens of a step; in a small one, each of the requests that run has room for one besides."""
        if not self.has_small_steps:
            return self.max_num_batched_tokens
        return min(self.max_num_batched_tokens, num_running + stage_tokens)

    @property
    def num_encoder_tokens(self) -> int:
        """Room of the encoder cache, in vectors; 0 for a model that takes tokens only."""
        return self.media.num_cache_tokens(self.encoder_cache_tokens, self.max_num_batched_tokens) if self.media else 0

    @property
    def max_num_rows(self) -> int:
        """Most requests that may run: each needs a token of every step, so that it advances."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_num_row_tokens(self) -> int:
        """The maximum number of tokens of one request in one step, without drafts."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens

    @property
    def max_num_step_tokens(self) -> int:
        """Most tokens of one request in one step, drafts included."""
        return min(self.max_num_row_tokens + self.max_num_drafts, self.max_num_batched_tokens)

    @property
    def max_num_drafts(self) -> int:
        """Most draft tokens of one row."""
        return self.num_lookahead_slots if self.speculative is None else self.speculative.num_speculative_tokens
