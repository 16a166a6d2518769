"""The work of the encoder in each step, and how far it lets prompts come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Any, Final

from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.encoder_cache import Encoded, EncoderCache
from llmstack_core_scheduler.media_numbers import MediaNumbers, media_keys
from llmstack_core_scheduler.request import Rank, Request
from llmstack_core_scheduler.request_queue import RequestQueue
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_types import (
    EncoderStats,
    EncoderWork,
    EngineCoreRequest,
    InvalidRequestError,
    MediaItem,
    MediaSpec,
    PrefixMedia,
)

IDLE_BUDGETS: Final = 8
"""Budgets of a step in which no request decodes: no stream waits for it, and an item is begun and ended in one."""
CROWDED_BUDGETS: Final = 8
"""Budgets of a step beside which more requests wait than decode, where each has an item of its own to be encoded first.

A row reads all weights however few there are. With one budget, 16 sounds through Whisper tiny decoded one by one.
"""

_NO_END: Final = 2**62
"""A place that no prompt and no answer reaches."""


class Encoding:
    """Encodes the items that requests need next, those of the first requests first.

    An item that a chunk of a prompt reaches is encoded before its rows, some layers per step where the budget asks for
    it; the chunk ends before one that is not complete. Between two steps at most one item is begun and not complete, so
    the runner holds the inner state of one. That one is finished before another is begun.

    The first running request always advances: it may take the room of all that follow it, the item under way costs at
    least one layer of each step, and every item fits by itself, or its request is refused.

    With cross attention each token needs its request's item, to the end of the answer: a row whose item went to another
    request waits until it is encoded again.
    """

    def __init__(self, config: SchedulerConfig, spec: MediaSpec, running: RequestQueue, waiting: Sized) -> None:
        """`running` and `waiting`: The requests, which are read only."""
        self.numbers = MediaNumbers()
        self.cache = EncoderCache(config.num_encoder_tokens)
        self._spec = spec
        self._running = running
        self._waiting = waiting
        self._has_own_budget = config.encoder_budget_units > 0
        self._max_num_units = config.encoder_budget_units or spec.step_units or config.max_num_batched_tokens
        self._can_cut_prompts = config.enable_chunked_prefill
        self._begun = 0
        self._freed: list[int] = []
        self._num_queries = self._num_hits = self._num_encoded = self._num_encoded_units = self._num_parts = 0
        self._step = 0
        self._plan: StepPlan | None = None
        self._num_left_units: int | None = None
        self._has_encoded = False
        self._needed: dict[int, Rank] | None = None

    def check(self, request: EngineCoreRequest) -> None:
        """Refuses a request with an item that there is never room for, or that the model does not take.

        Raises:
            InvalidRequestError: Names the item, as `media[0]`.
        """
        if self._spec.has_cross_attention:
            _check_cross_attention(request)
        room = self.cache.num_tokens
        for index, item in enumerate(request.media):
            problem = self._problem_of(item)
            if problem is not None:
                raise InvalidRequestError(f"media[{index}] {problem}.", param=f"media[{index}]")
            if not self._can_cut_prompts:
                room -= self._spec.num_vectors(item)
        if room < 0:
            text = f"The items have more vectors than the encoder cache has room for ({self.cache.num_tokens})"
            raise InvalidRequestError(f"{text}, and without chunked prefill it holds all of them.", param="media")

    def _problem_of(self, item: MediaItem) -> str | None:
        if item.kind not in self._spec.num_layers:
            return f"is of the kind {item.kind}, which the model does not take"
        sizes = self._spec.max_num_tokens
        most = sizes.get(item.kind, max(sizes.values(), default=0) if self._spec.is_atomic else item.num_tokens)
        if item.num_tokens > most:
            return f"has {item.num_tokens} tokens, but the model takes {most} at most"
        num_vectors = self._spec.num_vectors(item)
        if num_vectors > self.cache.num_tokens:
            room = self.cache.num_tokens
            return f"has {num_vectors} vectors, but the encoder cache has room for {room}: --encoder-cache-tokens"
        return None

    def accept(self, request: Request, numbers: Sequence[int] = ()) -> None:
        """Numbers the items of a new request, or gives them the `numbers` that they had in a snapshot.

        Raises:
            InvalidRequestError: There are no numbers left; nothing has changed.
        """
        arrival, items = request.arrival, request.arrival.media
        media = PrefixMedia(arrival.cache_salt, items)
        named = zip(numbers, items, strict=True) if numbers else self.numbers.number(arrival.prompt_token_ids, media)
        request.media = tuple(named)
        request.media_end = self._end_of(items[-1])
        request.key_ids = media_keys(request.token_ids, request.media)

    def ready_tokens(self, request: Request, start: int, num_tokens: int, plan: StepPlan) -> int:
        """The number of the request's next `num_tokens` tokens, from `start` on, that the step can compute.

        The items among them are encoded as far as budget and room allow. 0 where the next one has no vectors yet.
        """
        if plan is not self._plan:
            self._begin_step(plan)
        end = start + num_tokens
        for index, (_, item) in enumerate(request.media):
            if item.offset >= end:
                break
            if self._end_of(item) <= start:
                continue
            is_cut = self._spec.is_atomic and item.end > end
            if is_cut or not self._prepare(request, index, plan):
                end = item.offset
                break
        return max(end - start, 0)

    def has_begun(self, request: Request, start: int) -> bool:
        """Whether the request's next item, from `start` on, is being encoded."""
        number = next(number for number, item in request.media if self._end_of(item) > start)
        return self.cache.get(number) is not None

    def forget_broken(self, request: Request, start: int, num_tokens: int) -> None:
        """Drops the items that a row with an error read: their vectors may be what was wrong."""
        for number, item in request.media:
            if item.offset < start + num_tokens and self._end_of(item) > start:
                self._drop(number)

    def clear(self) -> None:
        """Drops everything; no request needs any of it."""
        for number in [number for number, _ in self.cache]:
            self._drop(number)

    def stats(self) -> EncoderStats:
        """Counts of encoded and kept items."""
        cache = self.cache
        return EncoderStats(
            cache.num_tokens, cache.num_tokens - cache.num_free_tokens, self._num_queries, self._num_hits,
            self._num_encoded, self._num_encoded_units, cache.num_evictions, cache.num_repeats, self._num_parts,
        )  # fmt: skip

    def _end_of(self, item: MediaItem) -> int:
        """The first place whose token needs an item no more: with cross attention all do."""
        return _NO_END if self._spec.has_cross_attention else item.end

    def _begin_step(self, plan: StepPlan) -> None:
        self._plan = plan
        self._step += 1
        self._num_left_units, self._has_encoded, self._needed = None, False, None
        plan.encoder_work, plan.freed_media = [], self._freed
        self._freed = []

    def _prepare(self, request: Request, index: int, plan: StepPlan) -> bool:
        """Whether an item is ready, or becomes so in this step."""
        number, item = request.media[index]
        entry = self.cache.get(number)
        is_ready = entry is not None and entry.is_ready
        if index >= request.num_media_seen:
            request.num_media_seen = index + 1
            self._num_queries += 1
            self._num_hits += is_ready
        if is_ready:
            self.cache.use(number, self._step)
            return True
        num_layers = self._spec.num_layers_of(item)
        if num_layers and self._begun not in (0, number) and not self._finish_begun(request, plan):
            return False
        if entry is None:
            entry = Encoded(self._spec.num_vectors(item), num_layers, item.num_units)
            if num_layers and not self._num_layers_now(entry, request):
                return False
            evicted = self.cache.make_room(entry.num_tokens, request.rank, self._step, self._needed_items())
            if evicted is None:
                return False
            plan.freed_media += evicted
            self.cache.add(number, entry)
        return self._encode(number, entry, request, request.arrival.media[index], plan)

    def _finish_begun(self, request: Request, plan: StepPlan) -> bool:
        """Goes on with the item that is begun, or drops it if no request needs it; whether none is begun any more."""
        number = self._begun
        entry = self.cache.get(number)
        if entry is None:
            self._begun = 0
            return True
        if entry.last_step == self._step or number in self._needed_items() or number in dict(request.media):
            return self._encode(number, entry, request, None, plan)
        self._drop(number)
        plan.freed_media += self._freed
        self._freed = []
        return True

    def _encode(self, number: int, entry: Encoded, request: Request, item: MediaItem | None, plan: StepPlan) -> bool:
        """Runs as many layers of an item as the budget has left; True if it is complete."""
        num_layers = self._num_layers_now(entry, request)
        if not num_layers and entry.num_layers:
            return False
        plan.encoder_work.append(EncoderWork(number, entry.num_done, num_layers, None if entry.num_done else item))
        self._num_parts += 1
        if num_layers:
            left = self._num_left_units or 0
            self._num_left_units = left - -(-entry.num_units * num_layers // entry.num_layers)
            self._has_encoded = True
            self._begun = number
        self._num_encoded_units += 0 if entry.num_done else entry.num_units
        entry.num_done += num_layers
        self.cache.use(number, self._step)
        if entry.is_ready:
            self._num_encoded += 1
            self._begun = 0 if number == self._begun else self._begun
        return entry.is_ready

    def _num_layers_now(self, entry: Encoded, request: Request) -> int:
        """The number of the item's layers that this step may run; the first work of a step is one at least."""
        if not entry.num_layers:
            return 0
        if self._num_left_units is None:
            self._num_left_units = self._max_num_units * self._num_budgets(request)
        num_layers = self._num_left_units * entry.num_layers // entry.num_units
        return min(max(num_layers, 0 if self._has_encoded else 1), entry.num_layers - entry.num_done)

    def _num_budgets(self, request: Request) -> int:
        decodes = (one is not request and len(one.token_ids) > one.num_prompt_tokens for one in self._running)
        num_decoding = sum(decodes)
        if not num_decoding:
            return IDLE_BUDGETS
        is_crowded = self._spec.has_cross_attention and len(self._waiting) > num_decoding
        return CROWDED_BUDGETS if is_crowded and not self._has_own_budget else 1

    def _needed_items(self) -> dict[int, Rank]:
        """The items that running requests have still to compute, with the first of their ranks; once per step."""
        if self._needed is None:
            self._needed = {}
            for request in self._running:
                if request.num_computed_tokens < request.media_end:
                    for number, item in request.media:
                        if self._end_of(item) > request.num_computed_tokens:
                            self._needed.setdefault(number, request.rank)
        return self._needed

    def _drop(self, number: int) -> None:
        if self.cache.remove(number):
            self._freed.append(number)
        if number == self._begun:
            self._begun = 0

    def state(self) -> dict[str, Any]:
        """The data on which its decisions depend, as builtins."""
        return {
            "numbers": self.numbers.state(),
            "entries": [
                (number, one.num_tokens, one.num_layers, one.num_units, one.num_done) for number, one in self.cache
            ],
            "counts": [self._begun, *self.stats()],
            "freed": self._freed.copy(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Puts a new one into a `state`."""
        self.numbers.restore(state["numbers"])
        for number, *counts in state["entries"]:
            self.cache.add(number, Encoded(*counts))
        (
            self._begun, _, _, self._num_queries, self._num_hits, self._num_encoded, self._num_encoded_units,
            self.cache.num_evictions, self.cache.num_repeats, self._num_parts,
        ) = state["counts"]  # fmt: skip
        self._freed = list(state["freed"])


def accept_media(request: Request, encoding: Encoding | None) -> None:
    """Checks and numbers the items of a new request.

    Raises:
        InvalidRequestError: The model takes none, or not these; nothing has changed.
    """
    if encoding is None and not request.arrival.media:
        return
    if encoding is None:
        raise InvalidRequestError("The model takes tokens only.", param="media")
    encoding.check(request.arrival)
    if request.arrival.media:
        encoding.accept(request)


def _check_cross_attention(request: EngineCoreRequest) -> None:
    if len(request.media) != 1:
        text = f"A prompt of this model has one item that all of its tokens attend to, and not {len(request.media)}"
        raise InvalidRequestError(f"{text}.", param="media")
    if (request.media[0].offset, request.media[0].num_tokens) != (0, 1):
        raise InvalidRequestError("media[0] has the first token of the prompt as its place.", param="media[0]")


def forget_media(encoding: Encoding | None) -> None:
    """Drops what is encoded; no request runs."""
    if encoding is not None:
        encoding.clear()


def dependents_of(request: Request, start: int, others: Iterable[Request]) -> list[Request]:
    """The requests that may read what the row of another one was to write from the token `start` on; O(tokens)."""
    keys, salt = request.keys[: start + 1], request.prefix_salt
    return [
        other
        for other in others
        if other is not request and other.prefix_salt == salt and other.keys[: start + 1] == keys
    ]
