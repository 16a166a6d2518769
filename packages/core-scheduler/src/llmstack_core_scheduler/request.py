"""A scheduled request: its tokens, how far they are computed, and its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmstack_core_scheduler.repetition import RepetitionDetector
from llmstack_types import EngineCoreRequest, MediaItem, RequestStatus, TokenLogprobs

Rank = tuple[float, ...]
"""The place of a request among others: smaller goes first. No two requests share one."""


StatusListener = Callable[[str, RequestStatus], None]
"""Receives the id of a request and the state it enters."""


NO_MEDIA: tuple[tuple[int, MediaItem], ...] = ()


def prefix_salt(cache_salt: str, lora_name: str | None) -> str:
    """The salt of a request's cached prefixes; two requests have the same one if salt and adapter are the same.

    This is the one place where the identity of an adapter becomes part of the prefix cache's key.
    """
    if lora_name is not None:
        return f"\x01{lora_name}\x01{cache_salt}"
    return f"\x01\x01{cache_salt}" if cache_salt.startswith("\x01") else cache_salt  # a client chooses its salt


class Request:
    """A request between its arrival and its end. Mutable, and only the scheduler changes it.

    Attributes:
        arrival: The request as it arrived; never changed.
        rank: Who goes first; fixed at arrival.
        parent: The request whose blocks it may share when it begins; None once it has begun.
        token_ids: Prompt and output; grows by what is sampled.
        num_tokens: Known tokens, and those that running steps will sample, unless one is certain to be the last.
        max_num_tokens: Length of `token_ids` at which the request ends.
        max_num_slots: Most tokens that it may ever need slots for.
        min_num_tokens: Length below which no token ends it.
        eos_token_ids: End-of-sequence ids that end it; empty under `ignore_eos`, unless it is constrained.
        is_constrained: Whether it has structured output: then an end-of-sequence id ends it at any length, since one
            is drawn early only where nothing else may follow.
        stop_token_ids: Further ids that end it.
        repetition: Ends it when it repeats itself; None where that was not asked for.
        ending_token_ids: `eos_token_ids` and `stop_token_ids` together.
        num_computed_tokens: Tokens whose KV exists, or will once the steps already scheduled have run.
        num_known_tokens: Tokens whose KV was found when it was last looked up, whether a state was found there or not.
        num_lost_tokens: Tokens whose KV it had when it was preempted, until it goes on.
        num_slots: Tokens that its block table has room for.
        next_passed_token: Computed tokens at which a sliding window passes another block; 0 where that is to be asked.
        num_queued_tokens: Tokens that it counts with in the waiting queue; set when it is queued.
        num_queued_prefill_tokens: Tokens among these that must be computed.
        num_paid_tokens: Length of `token_ids` up to which its tenant was charged; 0 before it is first admitted.
        has_lost_deadline: Whether its deadline passed before it began; it has none any more.
        num_preemptions: How often it has lost its row.
        is_protected: Whether that is as often as it may be.
        recompute_step: The last step that was scheduled before it lost its KV; results up to there are of before.
        is_finished: Whether it has ended, by whatever cause.
        has_more_to_tell: Whether its next message holds more than tokens: its first one does, and any with logprobs.
        num_cached_tokens: Prompt tokens found in the prefix cache when it was first admitted; -1 before.
        pools_whole_prompt: Whether it returns a vector that takes the hidden states of all its tokens.
        prefix_salt: Only requests with the same one share cached prefixes: it holds salt and adapter.
        num_overtakers: Requests that were admitted while it waited for a place of its adapter, or for the encoder.
        media: The items of its prompt, without their memory, each with its number; empty for a prompt of tokens.
        media_end: The place behind the last item; 0 for a prompt of tokens.
        num_media_seen: Items that it has come to, up to the furthest one.
        key_ids: As `keys` says; the same list as `token_ids` for a prompt of tokens.
        prompt_logprobs: Entries collected so far; None when not asked for, or sent.
    """

    __slots__ = (
        "arrival",
        "ending_token_ids",
        "eos_token_ids",
        "has_lost_deadline",
        "has_more_to_tell",
        "is_constrained",
        "is_finished",
        "is_protected",
        "key_ids",
        "max_num_slots",
        "max_num_tokens",
        "media",
        "media_end",
        "min_num_tokens",
        "next_passed_token",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_known_tokens",
        "num_lost_tokens",
        "num_media_seen",
        "num_overtakers",
        "num_paid_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_queued_prefill_tokens",
        "num_queued_tokens",
        "num_slots",
        "num_tokens",
        "on_status",
        "parent",
        "pools_whole_prompt",
        "prefix_salt",
        "prompt_logprobs",
        "rank",
        "recompute_step",
        "repetition",
        "request_id",
        "status",
        "stop_token_ids",
        "token_ids",
        "wants_logprobs",
    )

    def __init__(
        self,
        arrival: EngineCoreRequest,
        rank: Rank,
        max_num_tokens: int,
        parent: Request | None = None,
        on_status: StatusListener | None = None,
    ) -> None:
        params = arrival.sampling_params
        self.arrival = arrival
        self.request_id = arrival.request_id
        self.rank = rank
        self.status = RequestStatus.WAITING
        self.on_status = on_status
        self.token_ids = [*arrival.prompt_token_ids, *arrival.output_token_ids]
        self.key_ids, self.media, self.media_end, self.num_media_seen = self.token_ids, NO_MEDIA, 0, 0
        self.parent = parent
        self.num_prompt_tokens, self.num_tokens = len(arrival.prompt_token_ids), len(self.token_ids)
        self.max_num_tokens = max_num_tokens
        # The last token is sampled but never fed back: it needs no slot.
        self.max_num_slots = max(self.num_prompt_tokens, max_num_tokens - 1)
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.is_constrained = params.structured_outputs is not None
        ignores_eos = params.ignore_eos and not self.is_constrained
        self.eos_token_ids = frozenset(() if ignores_eos else arrival.eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.ending_token_ids = self.eos_token_ids | self.stop_token_ids
        detection = params.repetition_detection
        self.repetition = None if detection is None else RepetitionDetector(detection, self.num_prompt_tokens)
        self.num_computed_tokens = 0
        self.num_known_tokens = self.num_lost_tokens = 0
        self.num_slots = 0
        self.next_passed_token = 0
        self.num_queued_tokens = self.num_queued_prefill_tokens = 0
        self.num_paid_tokens = 0
        self.has_lost_deadline = False
        self.num_preemptions = 0
        self.num_overtakers = 0
        self.prefix_salt = prefix_salt(arrival.cache_salt, arrival.lora_name)
        self.is_protected = False
        self.recompute_step = 0
        self.is_finished = False
        self.has_more_to_tell = True
        self.num_cached_tokens = -1
        self.wants_logprobs = params.logprobs is not None
        pooling_params = arrival.pooling_params
        self.pools_whole_prompt = pooling_params is not None and pooling_params.needs_whole_prompt
        # A client that has the first token has these.
        is_asked_for = params.prompt_logprobs is not None and not arrival.output_token_ids
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if is_asked_for else None

    @property
    def num_left_tokens(self) -> int:
        """Known tokens that are not computed yet."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every prompt token has to be computed in its own row: then nothing of it may come from elsewhere."""
        return self.pools_whole_prompt or self.prompt_logprobs is not None

    @property
    def keys(self) -> list[int]:
        """The keys of its tokens in the prefix cache: ids, and numbers below 0 where vectors stand for them."""
        key_ids, token_ids = self.key_ids, self.token_ids
        if len(key_ids) != len(token_ids):
            key_ids += token_ids[len(key_ids) :]
        return key_ids

    def ending(self, status: RequestStatus) -> tuple[int, tuple[int, ...]]:
        """The end of a request, for its session: tokens (0 without blocks), and the last two, the last one first.

        Models end a call of a tool with other tokens than an answer. One that did not end has -1 in their place.
        """
        num_tokens = self.num_tokens if self.status is RequestStatus.RUNNING else 0
        did_end = status not in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
        return num_tokens, tuple(self.token_ids[:-3:-1]) if did_end else (-1,)

    def change_status(self, status: RequestStatus) -> None:
        """Enters a state and notifies the listener."""
        self.status = status
        if self.on_status is not None:
            self.on_status(self.request_id, status)

    def lose_kv(self, step: int, status: RequestStatus = RequestStatus.PREEMPTED) -> None:
        """Back to the queue: nothing is computed any more, the tokens stay. `step` is the last one scheduled."""
        self.change_status(status)
        self.num_lost_tokens, self.num_computed_tokens = self.num_computed_tokens, 0
        self.num_slots = 0
        self.next_passed_token = 0
        self.recompute_step = step

    def add_prompt_logprobs(self, num_computed_tokens: int, entries: Sequence[TokenLogprobs]) -> None:
        """Collects those of one row. What is computed again adds none, after the KV cache was lost.

        The row that completes the prompt may have been under way then: so what was collected before stays.
        """
        if self.prompt_logprobs is not None:
            num_known = len(self.prompt_logprobs) - 1 - num_computed_tokens
            self.prompt_logprobs.extend(entries[max(0, num_known) :])

    def swap_out(self) -> None:
        """Back to the queue: what is computed waits on the host."""
        self.change_status(RequestStatus.SWAPPED)
        self.num_slots = 0

    def start_again(self, step: int) -> None:
        """Back to the queue, with the tokens that are known and no other; `step` is the last one scheduled."""
        self.num_tokens = len(self.token_ids)
        self.lose_kv(step)

    def ghost(self) -> Request:
        """Stands for it in a step whose results are void."""
        ghost = Request(self.arrival, self.rank, self.max_num_tokens)
        ghost.is_finished = True
        return ghost

    def finish(self, status: RequestStatus) -> None:
        """Ends the request; `status` is one of the finished ones."""
        self.change_status(status)
        self.is_finished = True
