"""Prefixes on disk: blocks and states, found by tokens in a scope."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from llmstack_engine_core.disk_cache.block_files import BlockFiles, BlockMissError
from llmstack_engine_core.disk_cache.file_groups import ONE_GROUP, Extent, FileGroups, first_needed
from llmstack_engine_core.disk_cache.scopes import SEAL_BYTES, Chain, Scope
from llmstack_engine_core.kv_transfer.tag import TagMaker
from llmstack_types import EngineCoreRequest, EngineReady

MAX_EXTENT_BYTES: Final = 4 << 20
MAX_EXTENT_BLOCKS: Final = 8


class PrefixStore:
    """Blocks of prefixes in files. For any thread.

    A text is divided into extents: 8 blocks each, or as many as have 4 MiB, and what is left at the end. An extent is
    found only if its tokens and everything before them are those that were written, in the same scope.

    Groups of layers with sliding windows have extents of their own. Of a text those are written that the window sees at
    its end, so the first one may begin between two multiples of 8 blocks; its name says where.

    Attributes:
        files: Where they lie.
        groups: The groups of layers with block tables of their own.
        has_states: Whether a prefix is of use only up to a state.
        bytes_per_block: Size of a block of one group.
    """

    def __init__(self, files: BlockFiles, secret: bytes, tags: TagMaker, groups: FileGroups = ONE_GROUP) -> None:
        self.files, self.groups = files, groups
        self.bytes_per_block, self.bytes_per_state = tags.bytes_per_block, tags.bytes_per_state
        self.has_states = tags.bytes_per_state > 0
        self._secret, self._tags = secret, tags
        self._block_size = tags.ready.block_size
        bytes_per_block = max(tags.bytes_per_block * groups.most_in_a_file, 1)
        self._extent_blocks = min(max(MAX_EXTENT_BYTES // bytes_per_block, 1), MAX_EXTENT_BLOCKS)
        self._form = f"{self._extent_blocks} blocks in a file"
        if groups.num_groups > 1:
            self._form += f", groups by window {groups.window_to_numbers}"

    @property
    def needs_end(self) -> bool:
        """Whether a prefix is of use only with what is kept for its end: a state, or blocks of windows."""
        return self.has_states or bool(self.groups.windows)

    def follow_weights(self, ready: EngineReady) -> None:
        """Makes blocks those of the weights that `ready` names: no other ones are found after that."""
        self._tags = replace(self._tags, ready=ready)

    def chain(self, request: EngineCoreRequest, token_ids: Sequence[int]) -> Chain:
        """The blocks of a text of a request, with its items; O(tokens)."""
        facts = self._tags.facts(request, self._form)
        return Chain(Scope.of(self._secret, facts, request.tenant), self._block_size, token_ids, request.media)

    def find(self, chain: Chain, max_blocks: int) -> int:
        """The number of first blocks on disk, up to a state and windows if the model has them; nothing is read."""
        size, files, whole = self._extent_blocks, self.files, 0
        while whole + size <= max_blocks and chain.name(whole + size) in files:
            whole += size
        for end in range(min(whole + size - 1, max_blocks), 0, -1):
            if chain.name(end) in files and self._has_end(chain, end):
                return end
        return 0

    def stored(self, chain: Chain, extent: Extent) -> Extent | None:
        """The extent on disk with these blocks, and perhaps some before them; None if there is none."""
        first = extent.start // self._extent_blocks * self._extent_blocks
        others = (extent._replace(start=start) for start in range(extent.start, first - 1, -1))
        return next((one for one in others if self.name(chain, one) in self.files), None)

    def extents(self, start: int, end: int) -> list[Extent]:
        """The extents of a text of `end` blocks that contain blocks from number `start` on; those of windows the last.

        Of groups with a window there are the blocks that it sees at the end of the text.
        """
        return [one for window in (0, *self.groups.windows) for one in self._extents(start, end, window)]

    def name(self, chain: Chain, extent: Extent) -> str:
        """The name of the file of an extent."""
        return chain.window_name(*extent) if extent.window else chain.name(extent.end)

    def num_bytes(self, extents: Sequence[Extent]) -> int:
        """The bytes that are read of extents, and of the state behind them."""
        return sum(map(self._num_bytes, extents)) + self.bytes_per_state

    def content(self, chain: Chain, extent: Extent) -> tuple[bytearray, int]:
        """A text to be sealed, and where in it the blocks of an extent begin, which are to be filled in."""
        return _text(chain.head(extent.start, extent.end), self._num_bytes(extent))

    def state_content(self, chain: Chain) -> tuple[bytearray, int]:
        """As `content`, for the state after all blocks of a text."""
        return _text(chain.head(chain.num_blocks, chain.num_blocks), self.bytes_per_state)

    def read(self, chain: Chain, extent: Extent) -> bytearray:
        """The blocks of an extent in the form of the model runner.

        Raises:
            BlockMissError: They are not there, or differ in any bit from what was written.
        """
        head = chain.head(extent.start, extent.end)
        return self._read(chain.scope, self.name(chain, extent), head, self._num_bytes(extent))

    def read_state(self, chain: Chain, end: int) -> bytearray:
        """The state after the first `end` blocks.

        Raises:
            BlockMissError: As `read`.
        """
        return self._read(chain.scope, chain.state_name(end), chain.head(end, end), self.bytes_per_state)

    def remove(self, chain: Chain, extents: Iterable[Extent]) -> None:
        """Removes extents of a text, where they are there."""
        for extent in extents:
            self.files.remove(self.name(chain, extent))

    def touch(self, chain: Chain, end: int) -> None:
        """Notes the use of a text of `end` blocks."""
        names = [self.name(chain, self.stored(chain, extent) or extent) for extent in self.extents(0, end)]
        self.files.touch([*names, chain.state_name(end)] if self.has_states else names)

    def _num_bytes(self, extent: Extent) -> int:
        return self.groups.num_entries(extent) * self.bytes_per_block

    def _has_end(self, chain: Chain, end: int) -> bool:
        if self.has_states and chain.state_name(end) not in self.files:
            return False
        windows = self.groups.windows
        return all(self.stored(chain, one) for window in windows for one in self._extents(0, end, window))

    def _extents(self, start: int, end: int, window: int) -> Iterator[Extent]:
        size, least = self._extent_blocks, first_needed(window, end, self._block_size)
        for first in range(max(start, least) // size * size, end, size):
            yield Extent(max(first, least), min(first + size, end), window)

    def _read(self, scope: Scope, name: str, head: bytes, num_bytes: int) -> bytearray:
        try:
            text = scope.unseal(name, self.files.read(name, len(head) + num_bytes + SEAL_BYTES))
            if text[: len(head)] != head:
                raise BlockMissError("foreign")
        except BlockMissError:
            self.files.remove(name)
            raise
        return bytearray(memoryview(text)[len(head) :])


def _text(head: bytes, num_bytes: int) -> tuple[bytearray, int]:
    """A text of a head and zeros, made at once: megabytes are not copied."""
    text = bytearray(len(head) + num_bytes)
    text[: len(head)] = head
    return text, len(head)
