"""Lookups of long prefixes in pieces, so that none holds up the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmstack_kv_cache.prefix_index import ROOT, Prefix, PrefixIndex, RunPath, encode_salt

_LEAST_BLOCKS = 16
_MOST_BLOCKS = 256  # a piece packs so many blocks beyond those that it finds, at most


class PrefixWalk:
    """The position of a lookup. It holds no block: what is evicted in the meantime is no longer part of it."""

    __slots__ = ("_block_ids", "_index", "_num_cuts", "_path", "_prefix")

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._block_ids: list[int] = []
        self._prefix = ROOT
        self._path: RunPath = []
        self._num_cuts = index.num_cuts

    @property
    def num_blocks(self) -> int:
        """Blocks that it has found, and that were known when it last went on."""
        return len(self._block_ids)

    def go_on(self, token_ids: Sequence[int], num_blocks: int, salt: str) -> int:
        """Looks for up to `num_blocks` further blocks of `token_ids`, the last token apart; how many it has found.

        Fewer than that are the end of what is known. O(num_blocks), and where blocks have been evicted since, O(runs).

        Raises:
            ValueError: A token id does not fit into 32 bits.
        """
        self._drop_evicted()
        index, done, size = self._index, len(self._block_ids), 1
        first, end = done, min(done + num_blocks, (len(token_ids) - 1) // index.block_size)
        while done < end:
            size = min(size, end - done)
            contents, suffix = index.pack(token_ids, done, size), b"" if done else encode_salt(salt)
            found, self._prefix = index.match(contents, size, self._prefix, suffix, done, self._path)
            self._block_ids += found
            done += len(found)
            if len(found) < size:
                break
            size = min(max(size * 4, _LEAST_BLOCKS), _MOST_BLOCKS)
        return done - first

    def find(self, token_ids: Sequence[int], max_blocks: int, salt: str) -> tuple[list[int], Prefix]:
        """Finds a prefix as `PrefixIndex.find`, from the position of the walk on."""
        self.go_on(token_ids, max_blocks, salt)
        return self._block_ids.copy(), self._prefix

    def known(self) -> list[int]:
        """The blocks that it has found and that are still known."""
        self._drop_evicted()
        return self._block_ids.copy()

    def restore(self, block_ids: Iterable[int]) -> None:
        """Comes as far as a walk that had found these blocks, all of which are known."""
        self._block_ids = list(block_ids)
        for number, block_id in enumerate(self._block_ids):
            run = self._index.runs[block_id]
            if run is not None and (not self._path or self._path[-1][0] is not run):
                self._path.append((run, number))
        self._prefix = self._index.prefix(self._block_ids[-1]) if self._block_ids else ROOT

    def _drop_evicted(self) -> None:
        """Goes back to where the first run has lost a block. A run that has been cut never grows again."""
        if self._num_cuts == self._index.num_cuts:
            return
        self._num_cuts = self._index.num_cuts
        path, block_ids = self._path, self._block_ids
        ends = [start for _, start in path[1:]] + [len(block_ids)]
        for number, ((run, start), end) in enumerate(zip(path, ends, strict=False)):
            num_left = len(run.block_ids)
            if num_left < end - start:
                del block_ids[start + num_left :]
                del path[number + (num_left > 0) :]
                self._prefix = Prefix(path[-1][0], len(block_ids) - path[-1][1] - 1) if path else ROOT
                return
