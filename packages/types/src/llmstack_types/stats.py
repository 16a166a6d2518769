"""Figures that one step reports about itself."""

from __future__ import annotations

from typing import Final, NamedTuple

from llmstack_types.media import EncoderStats
from llmstack_types.sampling_params import SamplingParams

DISK_MISS_CAUSES: Final = ("absent", "damaged", "foreign", "unreadable", "late", "evicted", "no_room", "costly")
"""Why a prefix was not read from disk, or not to its end."""

COMPUTED_CAUSES: Final = (
    "new", "block_end", "evicted", "preempted", "released", "reset", "other_adapter", "no_state", "not_looked_up",
    "disk_costly", "disk_late", "disk_failed", "disk_no_room",
)  # fmt: skip
"""Why tokens are computed: `new` ones for the first time, as far as is known; the others were computed before."""


class DiskCacheStats(NamedTuple):
    """The prefix cache on disk at one moment; counters grow from the engine's start.

    Attributes:
        num_bytes: The size of its files.
        num_requests: Counter of requests that looked for blocks on disk, since memory had too few.
        num_tokens: Counter of tokens that were read.
        num_read_bytes: Counter of the bytes of their blocks.
        num_written_bytes: Counter of bytes that were written.
        num_dropped: Counter of files that were not written, for want of room or since the disk failed.
        num_misses: Counters of requests by `DISK_MISS_CAUSES`.
    """

    num_bytes: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    num_read_bytes: int = 0
    num_written_bytes: int = 0
    num_dropped: int = 0
    num_misses: tuple[int, ...] = (0,) * len(DISK_MISS_CAUSES)


class SchedulerStats(NamedTuple):
    """The scheduler's state after a step; counters grow from the engine's start.

    A named tuple, since every step makes one.

    Attributes:
        step: Number of steps so far.
        num_running: Requests with blocks.
        num_waiting: Requests without blocks, new and preempted; swapped-out ones are among them.
        num_scheduled_tokens: Tokens computed in this step.
        num_free_blocks: Blocks that no request references; cached ones count, since they can be evicted.
        num_blocks: All blocks that requests can use.
        num_preemptions: Counter of preemptions.
        prefix_cache_queries: Counter of tokens looked up in the prefix cache.
        prefix_cache_hits: Counter of tokens found there.
        num_swapped: Requests whose blocks are on the host.
        num_host_blocks: Blocks of the host pool.
        num_free_host_blocks: Host blocks that no request holds.
        num_swap_preemptions: Counter of those preemptions that moved blocks to the host; the others compute again.
        num_swapped_out_blocks: Counter of blocks copied to the host.
        num_swapped_in_blocks: Counter of blocks copied back.
        num_forks: Counter of requests that began with another's blocks.
        num_draft_tokens: Counter of draft tokens computed.
        num_accepted_draft_tokens: Counter of those that were right and are part of an answer.
        num_drafts: Counter of rows with draft tokens.
        num_accepted_draft_tokens_per_place: The accepted ones by their place in the row, first to last.
        num_waiting_tokens: Tokens of the waiting requests: prompts, and the part of the outputs that the scheduler
            counts.
        num_admitted_tokens: Counter of these tokens of the requests that were admitted.
        num_scheduled_rows: Rows of this step.
        num_running_prefill_tokens: Tokens of its requests that this step left for later ones.
        num_waiting_prefill_tokens: Tokens of the waiting requests that are to be computed, if no prefix is found.
        num_waiting_tokens_per_tenant: The waiting tokens of the tenants with the most; empty where all share one
            queue.
        waiting_tenants: The same tenants.
        prefix_tokens_without_state: Counter of tokens that were found in the prefix cache, but are computed again since
            no state was kept where they end.
        num_computed_tokens_per_cause: Counters of tokens that requests compute, by `COMPUTED_CAUSES`, counted when they
            begin or go on; empty without prefix caching.
        num_agreeing_audits: Counter of prefix hits that were computed again and found to be right.
        num_differing_audits: Counter of those that were found to be wrong.
        disk: The prefix cache on disk; None without.
        encoder: What is encoded and kept; None for a model that takes tokens only.
    """

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_scheduled_tokens: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_swapped: int = 0
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    num_swap_preemptions: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_forks: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_drafts: int = 0
    num_accepted_draft_tokens_per_place: tuple[int, ...] = ()
    num_waiting_tokens: int = 0
    num_admitted_tokens: int = 0
    num_scheduled_rows: int = 0
    num_running_prefill_tokens: int = 0
    num_waiting_prefill_tokens: int = 0
    num_waiting_tokens_per_tenant: tuple[int, ...] = ()
    waiting_tenants: tuple[str, ...] = ()
    prefix_tokens_without_state: int = 0
    num_computed_tokens_per_cause: tuple[int, ...] = ()
    num_agreeing_audits: int = 0
    num_differing_audits: int = 0
    encoder: EncoderStats | None = None
    disk: DiskCacheStats | None = None

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that requests hold, in [0, 1]."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


class RequestProgress(NamedTuple):
    """A completion that has not ended.

    Attributes:
        num_prompt_tokens: Tokens of its prompt; 0 where another completion of the same request has it.
        num_output_tokens: Tokens that it has so far.
        max_num_output_tokens: Tokens that it has at most when it ends.
        can_stop: Whether it may end before, by a token, a text or a constraint.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    max_num_output_tokens: int
    can_stop: bool

    @classmethod
    def of(cls, num_prompt_tokens: int, num_output_tokens: int, params: SamplingParams) -> RequestProgress:
        """The progress of a completion with these parameters, as they are after all checks."""
        max_tokens = params.max_tokens or 0
        can_stop = params.min_tokens < max_tokens and bool(
            not params.ignore_eos
            or params.stop
            or params.stop_token_ids
            or params.structured_outputs
            or params.repetition_detection
        )
        return cls(num_prompt_tokens, num_output_tokens, max_tokens, can_stop)
