"""Sessions that are given up, with the blocks that nothing else shares."""

from __future__ import annotations

from itertools import takewhile

from llmstack_kv_cache.block_pool import BlockPool, drop_blocks
from llmstack_kv_cache.lookup import NO_LOOKUP, Lookup
from llmstack_kv_cache.run_chains import blocks_of
from llmstack_kv_cache.session_ledger import SessionLedger
from llmstack_kv_cache.session_turns import Session


class SessionAccounts:
    """The base of the accounts of a cache: sessions, and the blocks that they hold."""

    block_size: int
    _ledger: SessionLedger | None
    _lookup: Lookup
    _pool: BlockPool

    def release_sessions(self, owner: str, name: str) -> tuple[int, int]:
        """Gives up the sessions of an owner that have a name; how many there were, and the tokens of their free blocks.

        What others share, or might share, stays; what requests hold is given up when they end. O(their blocks).
        """
        sessions = [] if self._ledger is None else self._ledger.named(owner, name)
        return len(sessions), sum(map(self._give_up, sessions))

    def _give_up(self, session: Session) -> int:
        """Gives up the last blocks of a session that nothing else has; returns the number of their tokens."""
        if self._ledger is None:
            return 0
        self._lookup = NO_LOOKUP
        prefix, num_kept = self._ledger.release(session)
        blocks = blocks_of(prefix)
        free = list(takewhile(self._pool.is_free, blocks[: max(len(blocks) - num_kept, 0)]))
        drop_blocks(self._pool, free)
        return len(free) * self.block_size
