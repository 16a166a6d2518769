"""A KV-cache manager in plain Python: slow, and simple enough to be believed."""

from __future__ import annotations

from collections.abc import Sequence


class FakeSessions:
    """Takes no notice of sessions."""

    now_s = 0.0
    num_computed_tokens: Sequence[int] = ()

    def begin(
        self, request_id: str, token_ids: Sequence[int], salt: str, num_found_tokens: int, owner: str, **facts: object
    ) -> None:
        """Does nothing: sessions decide nothing here."""

    def resume(self, num_lost_tokens: int) -> None:
        """Does nothing: sessions decide nothing here."""

    def end(self, request_id: str, num_tokens: int, ending: tuple[int, ...], token_ids: Sequence[int]) -> None:
        """Does nothing: sessions decide nothing here."""

    def take_returns(self) -> Sequence[tuple[str, str, float, int, int, str, float, str]]:
        """Returns nothing, since no session is known."""
        return ()


class FakeKVCacheManager:
    """A KV-cache manager that is slow and plain: whole prefixes as keys, a list for the order of eviction."""

    def __init__(self, num_blocks: int, block_size: int = 16, *, num_host_blocks: int = 0) -> None:
        self.sessions = FakeSessions()
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.num_groups = 1
        self.has_windows = self.has_states = False
        self.num_known_tokens = self.prefix_tokens_without_state = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._free = list(range(num_blocks))
        self._host_free = list(range(num_host_blocks))
        self._host_tables: dict[str, list[int]] = {}
        self._tables: dict[str, list[int]] = {}
        self._salts: dict[str, str] = {}
        self._prefix_to_block_id: dict[tuple[str, tuple[int, ...]], int] = {}
        self._num_looked_up: dict[str, int] = {}  # blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks in no table."""
        return len(self._free)

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks of no swapped-out request."""
        return len(self._host_free)

    def get_computed_blocks(self, request_id: str, token_ids: Sequence[int], salt: str = "") -> tuple[list[int], int]:
        """The longest cached prefix, in whole blocks and never all tokens."""
        block_ids: list[int] = []
        for end in range(self.block_size, len(token_ids), self.block_size):
            block_id = self._prefix_to_block_id.get((salt, tuple(token_ids[:end])))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids, len(block_ids) * self.block_size

    def look_ahead(self, request_id: str, token_ids: Sequence[int], max_num_blocks: int, salt: str = "") -> int:
        """The number of known blocks beyond those that were looked up before, `max_num_blocks` at most."""
        num_known = len(self.get_computed_blocks(request_id, token_ids, salt)[0])
        num_before = min(self._num_looked_up.get(request_id, 0), num_known)
        self._num_looked_up[request_id] = min(num_known, num_before + max_num_blocks)
        return self._num_looked_up[request_id] - num_before

    def allocate_slots(
        self, request_id: str, num_tokens: int, computed_block_ids: Sequence[int] = (), salt: str = ""
    ) -> list[int] | None:
        """The blocks appended to the request's table, or None."""
        table = self._tables.get(request_id, [])
        num_new_blocks = -(-num_tokens // self.block_size) - len(table) - len(computed_block_ids)
        available = [block_id for block_id in self._free if block_id not in computed_block_ids]
        if num_new_blocks > len(available):
            return None
        new_block_ids = available[: max(num_new_blocks, 0)]
        self._forget(new_block_ids)
        appended = [*computed_block_ids, *new_block_ids]
        self._free = [block_id for block_id in self._free if block_id not in appended]
        self._tables[request_id] = table + appended
        self._num_looked_up.pop(request_id, None)
        self._salts.setdefault(request_id, salt)
        return appended

    def num_blocks_needed(self, num_tokens: int, num_computed_tokens: int, max_num_step_tokens: int) -> int:
        """A block for every `block_size` tokens."""
        return -(-num_tokens // self.block_size)

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks in the request's table."""
        return len(self._tables.get(request_id, ()))

    def advance(self, request_id: str, num_computed_tokens: int) -> int:
        """There are no windows: to be called again after more tokens than any request has."""
        return 2**62

    def advance_state(
        self, request_id: str, num_tokens: int, *, is_kept: bool = True, replaces_last: bool = False
    ) -> tuple[int, int]:
        """The empty state: there are no others."""
        return 0, 0

    def end_step(self) -> None:
        """Does nothing, since there are no states."""

    def keeps_prefix(self, request_id: str, num_tokens: int) -> bool:
        """True, since nothing is freed before the end."""
        return True

    def cache_blocks(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Makes the full blocks below `num_computed_tokens` findable."""
        for index in range(num_computed_tokens // self.block_size):
            prefix = self._salts[request_id], tuple(token_ids[: (index + 1) * self.block_size])
            self._prefix_to_block_id.setdefault(prefix, self._tables[request_id][index])

    def forget_prefix(self, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> None:
        """Makes blocks that reach beyond the first `num_tokens` unfindable, and all prefixes that begin with them."""
        forgotten = tuple(token_ids[: (num_tokens // self.block_size + 1) * self.block_size])
        self._prefix_to_block_id = {
            (of_salt, prefix): block_id
            for (of_salt, prefix), block_id in self._prefix_to_block_id.items()
            if of_salt != salt or prefix[: len(forgotten)] != forgotten
        }

    def block_table(self, request_id: str) -> list[int]:
        """The request's blocks, in order."""
        return self._tables[request_id].copy()

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> list[tuple[int, int]] | None:
        """Shares the full blocks of the parent's first tokens, and copies the one that is begun."""
        num_full_blocks, num_rest = divmod(num_tokens, self.block_size)
        if num_rest and not self._free:
            return None
        table = self._tables[parent_id]
        self._tables[child_id] = table[:num_full_blocks]
        self._salts[child_id] = self._salts[parent_id]
        if not num_rest:
            return []
        copied = self.allocate_slots(child_id, num_tokens) or []
        return list(zip(table[num_full_blocks:], copied, strict=False))

    def swap_out(self, request_id: str) -> list[tuple[int, int]] | None:
        """Moves all blocks of the request to the host, shared ones too."""
        table = self._tables[request_id]
        if len(table) > len(self._host_free):
            return None
        salt = self._salts[request_id]
        self.free(request_id)
        host_table = self._host_free[: len(table)]
        del self._host_free[: len(table)]
        self._host_tables[request_id], self._salts[request_id] = host_table, salt
        return list(zip(table, host_table, strict=True))

    def swap_in(self, request_id: str) -> list[tuple[int, int]] | None:
        """Swaps all blocks of the request in."""
        host_table = self._host_tables[request_id]
        table = self.allocate_slots(request_id, len(host_table) * self.block_size)
        if table is None:
            return None
        self._host_free += self._host_tables.pop(request_id)
        return list(zip(host_table, table, strict=True))

    def free(self, request_id: str) -> None:
        """Drops the request's references, last block first."""
        self._num_looked_up.pop(request_id, None)
        self._host_free += self._host_tables.pop(request_id, [])
        table = self._tables.pop(request_id, [])
        self._salts.pop(request_id, None)
        held = {block_id for other in self._tables.values() for block_id in other}
        self._free += [block_id for block_id in reversed(table) if block_id not in held]

    def reset_prefix_cache(self) -> bool:
        """Forgets every prefix, unless a request holds blocks."""
        if self._tables:
            return False
        self._prefix_to_block_id.clear()
        self._num_looked_up.clear()
        return True

    def release_sessions(self, owner: str, name: str) -> tuple[int, int]:
        """Releases none: it knows of no sessions."""
        return 0, 0

    def _forget(self, block_ids: list[int]) -> None:
        self._prefix_to_block_id = {
            prefix: block_id for prefix, block_id in self._prefix_to_block_id.items() if block_id not in block_ids
        }
