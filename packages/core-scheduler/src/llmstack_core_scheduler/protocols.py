"""Protocols of the scheduler: the KV-cache manager and the source of drafts.

`llmstack-kv-cache` satisfies the first structurally, without importing this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Sessions(Protocol):
    """Sessions as a cache knows them. Equal calls give equal answers.

    Attributes:
        now_s: The time.
    """

    now_s: float

    @property
    def num_computed_tokens(self) -> Sequence[int]:
        """Counters of tokens that are computed, by `COMPUTED_CAUSES`."""
        ...

    def begin(
        self, request_id: str, token_ids: Sequence[int], salt: str, num_found_tokens: int, owner: str,
        *, num_known_tokens: int, name: str, is_final: bool, disk_miss: str, is_looked_up: bool,
    ) -> None:  # fmt: skip
        """A request begins; not again after a preemption.

        Args:
            request_id: Of the request.
            token_ids: Its prompt.
            salt: Prefixes are found under it.
            num_found_tokens: How much of the prompt was found.
            owner: Whose it is.
            num_known_tokens: How much was there, of which the last part has no state.
            name: What its client calls the session.
            is_final: Whether the session is given up when the request ends.
            disk_miss: What was in the way of blocks on disk, one of `DISK_MISS_CAUSES`; empty for nothing.
            is_looked_up: Whether the prompt was looked for at all.
        """
        ...

    def resume(self, num_lost_tokens: int) -> None:
        """A request goes on after a preemption, and computes so many tokens again."""
        ...

    def end(self, request_id: str, num_tokens: int, ending: tuple[int, ...], token_ids: Sequence[int]) -> None:
        """A request with so many tokens has ended, and is freed next; how it ended, the most general first."""
        ...

    def take_returns(self) -> Sequence[tuple[str, str, float, int, int, str, float, str]]:
        """The sessions that have gone on since the last call, as the fields of `SessionReturn`."""
        ...


class KVCacheManager(Protocol):
    """Hands out blocks of the KV cache and remembers which prefixes are in them.

    Everything is a plain value: capacity is an answer (`None`, a count), never an exception. No method reads a clock,
    draws a random number or depends on the order of a set, so equal calls give equal answers.
    """

    @property
    def sessions(self) -> Sessions:
        """The sessions; they are notified of the time, and of requests that begin and end."""
        ...

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can use."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request references; cached ones count, since allocation may evict them."""
        ...

    @property
    def num_groups(self) -> int:
        """Groups of layers with block tables of their own.

        All lists of block ids are interleaved: for each block of tokens they have the id of every group.
        """
        ...

    @property
    def has_windows(self) -> bool:
        """Whether `advance` ever frees a block."""
        ...

    @property
    def has_states(self) -> bool:
        """Whether the model has layers with a state: then each step calls `advance_state` and `end_step`."""
        ...

    @property
    def num_known_tokens(self) -> int:
        """Tokens that the last lookup would have found, if there were a state at every boundary."""
        ...

    @property
    def prefix_tokens_without_state(self) -> int:
        """Counter of tokens that were found in the prefix cache, but are computed again for want of a state."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host pool, to which requests can be swapped out; 0 for none."""
        ...

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that no swapped-out request holds."""
        ...

    @property
    def prefix_cache_queries(self) -> int:
        """Counter of tokens looked up in the prefix cache."""
        ...

    @property
    def prefix_cache_hits(self) -> int:
        """Counter of tokens found there."""
        ...

    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], salt: str = "") -> tuple[list[int], int]:
        """The longest cached prefix of `token_ids`: its block ids, and how many of its tokens need not be computed.

        Whole blocks only, and never all tokens: at least one is left to compute, so that there are logits to sample
        from. With states the blocks may reach beyond those tokens: what has no state is computed again, and the
        blocks are read and not written. Takes nothing; the blocks are safe until the next lookup, or until a request
        is given blocks.
        """
        ...

    def look_ahead(self, request_id: str, token_ids: Sequence[int], max_num_blocks: int, salt: str = "") -> int:
        """Goes on with a lookup that takes several steps; how many blocks it has found now, at most `max_num_blocks`.

        Fewer say that nothing further is known at the moment. `get_computed_blocks` begins where this ends, until the
        request holds blocks or is freed. The work is bounded by `max_num_blocks`. It takes nothing, and what it has
        found may be evicted in the meantime.
        """
        ...

    def allocate_slots(
        self, request_id: str, num_tokens: int, computed_block_ids: Sequence[int] = (), salt: str = ""
    ) -> list[int] | None:
        """Makes room for the request's first `num_tokens` tokens; the block ids appended to its table, or None if full.

        For a request the manager does not know, `computed_block_ids` (from the last lookup) become the head of its
        table, are referenced, and are part of the answer. None changes nothing.
        """
        ...

    def num_blocks_needed(self, num_tokens: int, num_computed_tokens: int, max_num_step_tokens: int) -> int:
        """Most blocks that a request holds at once while it grows from `num_computed_tokens` to `num_tokens`.

        It computes at most `max_num_step_tokens` in a step. No other request changes the answer.
        """
        ...

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks that the request holds, 0 if none; those of sliding windows only if no other request shares them."""
        ...

    def advance(self, request_id: str, num_computed_tokens: int, *, keeps_leader: bool = False) -> int:
        """Frees the blocks that sliding windows have passed: no token from `num_computed_tokens` on attends to them.

        The scheduler calls it before it allocates blocks in the same step. Returns the number of computed tokens from
        which on another call can free more. With `keeps_leader` the blocks that tell the prefix stay.
        """
        ...

    def advance_state(
        self, request_id: str, num_tokens: int, *, is_kept: bool = True, replaces_last: bool = False
    ) -> tuple[int, int]:
        """The state blocks that a request's row reads and writes: it reaches the state after `num_tokens` tokens.

        Once per row of a step that is otherwise complete, so that none lacks room: a request that holds blocks has room
        for two states. One that `is_kept` can be found later, if it is at a block boundary; with `replaces_last` in
        place of the one before.
        """
        ...

    def known_prefix(self, block_ids: list[int], token_ids: Sequence[int], salt: str = "") -> tuple[list[int], int]:
        """The blocks of a prefix that was just found, as far as a known state, and that state's block; 0 is none.

        Those that tell the prefix are among them also where a window has passed.
        """
        ...

    def contents(self, block_ids: Iterable[int]) -> list[int]:
        """The content of each block as a number that no other prefix ever has; 0 where nothing finds the block."""
        ...

    def end_step(self) -> None:
        """Ends a step. Its states can be found from the next one on: they are not read in the step that writes them."""
        ...

    def keeps_prefix(self, request_id: str, num_tokens: int) -> bool:
        """Whether `fork` can share the request's first `num_tokens` tokens: no window has passed what follows them."""
        ...

    def cache_blocks(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Makes the request's full blocks below `num_computed_tokens` findable.

        The scheduler calls it when the step that fills them is scheduled: rows of the same step may read them, because
        the runner writes every row's KV before any row attends.
        """
        ...

    def forget_prefix(self, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> None:
        """Makes what follows the first `num_tokens` of the tokens unfindable: the step that was to fill it failed."""
        ...

    def block_table(self, request_id: str) -> list[int]:
        """The block ids of a request that holds blocks: token i lies in those from i // block_size * num_groups on."""
        ...

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> list[tuple[int, int]] | None:
        """Gives `child_id` the parent's first `num_tokens` tokens: its copies (source, destination), or None if full.

        Full blocks are shared; a last one that is begun is copied, by the runner. None changes nothing.
        """
        ...

    def swap_out(self, request_id: str) -> list[tuple[int, int]] | None:
        """Moves a request to the host pool: the copies (block, host block), or None if it lacks room.

        The blocks are free at once. None changes nothing.
        """
        ...

    def swap_in(self, request_id: str) -> list[tuple[int, int]] | None:
        """Swaps a request in: the copies (host block, block), or None if there is no room.

        The host blocks are free at once. None changes nothing.
        """
        ...

    def free(self, request_id: str) -> None:
        """Drops the request's references, last block first: the head of a prefix is evicted last. Idempotent.

        A swapped-out request gives its host blocks back.
        """
        ...

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, with nothing done, while a request holds blocks."""
        ...

    def release_sessions(self, owner: str, name: str) -> tuple[int, int]:
        """Gives up the sessions of an owner that have a name; how many there were, and the tokens that are forgotten.

        What others share stays, and what requests hold does until they end.
        """
        ...


DraftOwner = tuple[str, str]
"""Tenant and salt of a request: no draft of another owner's request may depend on its tokens."""


class DraftSource(Protocol):
    """Guesses tokens, so that one step may verify several. A pure function of its calls, as the scheduler is."""

    def propose(
        self, request_id: str, token_ids: Sequence[int], max_num_tokens: int, owner: DraftOwner
    ) -> Sequence[int]:
        """Guesses at what follows `token_ids`, the likeliest at each place; those beyond `max_num_tokens` are dropped.

        `token_ids` is the scheduler's own list: it is to be read only. Between two calls for a request it only grows.
        """
        ...

    def learn(self, owner: DraftOwner, token_ids: Sequence[int]) -> None:
        """Takes the answer of a request that has ended."""
        ...

    def forget(self, request_id: str) -> None:
        """Drops what is kept about a request that has ended, or lost its row and may be resumed; unknown ids too."""
        ...
