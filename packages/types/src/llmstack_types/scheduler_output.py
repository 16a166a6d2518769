"""Work of one step, from the scheduler to the model runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llmstack_types.media import EncoderWork, MediaItem
from llmstack_types.pooling_params import PoolingParams
from llmstack_types.sampling_params import SamplingParams

DRAFT_TO_MAKE: Final = 0xFFFF_FFFF
"""Stands for a draft token that the runner's draft model is to guess before the row is computed; no token's id."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request the runner has no row for: new, forked from another, or resumed after a preemption.

    Its first row may begin beyond token 0: what comes before lies in its blocks, by a prefix hit, a copy or a swap-in.

    Attributes:
        token_ids: All known tokens, prompt then output; the runner owns the list from here on.
        num_prompt_tokens: How many of them are the prompt.
        sampling_params: `seed` is set; counts of penalties and of `min_tokens` start at `num_prompt_tokens`.
        eos_token_ids: Masked by the sampler until `min_tokens` is reached, as are `stop_token_ids`.
        lora_name: Identity of the adapter to use, which is loaded; None is the base model.
        pooling_params: The row that completes the prompt returns a vector and samples nothing; None for a completion.
        media: The items of the prompt, each with its number; their memory comes with `SchedulerOutput.encoder_work`.
        num_held_tokens: Leading tokens whose KV others wrote into the row's blocks. Where rows compute one of them
            again, since no state was found after it, its KV is read and not written.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    lora_name: str | None = None
    pooling_params: PoolingParams | None = None
    media: tuple[tuple[int, MediaItem], ...] = ()
    num_held_tokens: int = 0


class ScheduledRequest(NamedTuple):
    """One row of a step; a named tuple, since every running request makes one per step.

    The row computes tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens) of the request. It samples
    one token if that reaches the last known token, none otherwise (a chunk of a prefill). Under asynchronous scheduling
    the last known token may be the one that the step before this one samples: the runner knows it, the scheduler not.

    Draft tokens follow the last known token and are computed with it. The row then samples one token more than it
    accepts drafts, and no row reads the KV of those it rejects: their slots are computed again.

    Attributes:
        num_computed_tokens: Tokens whose KV exists before this step.
        num_scheduled_tokens: At least 1; the draft tokens are among them.
        new_block_ids: Blocks to append to the request's block table; for a new request, its whole table. Where groups
            of layers have tables of their own (`KVCacheSpec.table_groups`), their ids alternate, block by block.
        draft_token_ids: Guesses at the tokens that follow, to be verified. All of a row are known, or all of them are
            `DRAFT_TO_MAKE`: then the runner makes so many, or fewer, and fewer tokens of the row are computed.
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: list[int]
    draft_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step.

    The runner applies `removed_request_ids` and `freed_media`, then `new_requests`, then the copies of blocks, then
    runs `encoder_work` and `scheduled_requests`. In each layer the KV of every row is written before any row attends: a
    row may read, through its block table, blocks that another row of the same step fills (prefix hits within a batch).

    Copies go in the order `swap_outs`, `swap_ins`, `block_copies`, each list from its first pair to its last: a block
    that is swapped out may be another's destination in the same step.

    A model with states also reads and writes a state block per row. A row reads what an earlier step has written, and
    writes a block that no row of the step reads, so a step may be computed again. It writes the state after its known
    tokens; drafts write none, and their tokens that are accepted are part of the request's next row again.

    Attributes:
        removed_request_ids: Rows to drop: finished, aborted or preempted since the last step.
        swap_outs: Copies to the host, (block, host block).
        swap_ins: Copies from the host, (host block, block).
        block_copies: Copies on the device, (source, destination).
        states: State blocks (read, written) of each row, in the order of `scheduled_requests`. 0 is the state before
            the first token, and is never written. Empty for a model without states.
        encoder_work: Parts of items to encode; a row may read the vectors of an item that is complete with this step.
        freed_media: Numbers of items whose vectors, or the beginnings of them, are no longer needed.
        total_num_scheduled_tokens: Sum over the rows, at most `max_num_batched_tokens`; 0 when there is nothing to run.
    """

    step: int
    new_requests: list[NewRequest] = field(default_factory=list)
    scheduled_requests: list[ScheduledRequest] = field(default_factory=list)
    removed_request_ids: list[str] = field(default_factory=list)
    total_num_scheduled_tokens: int = 0
    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    states: list[tuple[int, int]] = field(default_factory=list)
    encoder_work: list[EncoderWork] = field(default_factory=list)
    freed_media: list[int] = field(default_factory=list)

    def is_empty(self) -> bool:
        """True when no row has anything to compute, and nothing is to be encoded."""
        return not self.scheduled_requests and not self.encoder_work
