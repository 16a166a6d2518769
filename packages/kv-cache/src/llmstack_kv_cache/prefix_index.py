"""Which block holds which prefix: an exact lookup, not a hash that could collide.

A block's key is the identity of its parent's content followed by its own token ids, packed into one `bytes`; the parent
of a first block is the root, and its key ends with the salt. Identities are numbers that grow and are never used twice.
So equal keys mean equal prefixes, whatever became of the block ids in between: when a parent is evicted its identity
dies with it, the children that name it can never be found again, and their blocks are reclaimed in their turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from struct import Struct
from struct import error as PackError

from llmstack_kv_cache.block import ROOT_IDENTITY

_NOT_PACKED = "token_ids must be integers of 32 bits"


class PrefixIndex:
    """Exact map from prefixes, in whole blocks, to block ids.

    A findable block of 16 tokens costs about 200 bytes: its key (112), its entry of the map, and two list entries.

    Attributes:
        keys: By block id, the key under which the block is found; None where it is not.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._pack = Struct(f"<q{block_size}i").pack
        self._key_to_block_id: dict[bytes, int] = {}
        self.keys: list[bytes | None] = [None] * num_blocks
        self._identities = [ROOT_IDENTITY] * num_blocks
        self._fresh_identities = count(ROOT_IDENTITY + 1)

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._key_to_block_id)

    def identity(self, block_id: int) -> int:
        """Identity of the content of a block of the index."""
        return self._identities[block_id]

    def find(self, token_ids: Sequence[int], max_blocks: int, salt: str) -> list[int]:
        """Blocks of the longest known prefix of `token_ids`, at most `max_blocks`.

        Raises:
            ValueError: A token id does not fit into 32 bits.
        """
        find, pack, size = self._key_to_block_id.get, self._pack, self._block_size
        found: list[int] = []
        parent, suffix = ROOT_IDENTITY, _encode(salt)
        try:
            for start in range(0, max_blocks * size, size):
                block_id = find(pack(parent, *token_ids[start : start + size]) + suffix)
                if block_id is None:
                    break
                found.append(block_id)
                parent, suffix = self._identities[block_id], b""
        except PackError as error:
            raise ValueError(_NOT_PACKED) from error
        return found

    def insert(self, block_ids: Sequence[int], token_ids: Sequence[int], start: int, parent: int, salt: str) -> int:
        """Makes blocks findable that hold `token_ids` from `start` on, a whole block each; the last one's identity.

        Where the same prefix is known in another block, that one stays, and what follows is chained to it.

        Raises:
            ValueError: A token id does not fit into 32 bits; blocks before it have been inserted, which does no harm.
        """
        setdefault, pack, size = self._key_to_block_id.setdefault, self._pack, self._block_size
        keys, identities = self.keys, self._identities
        suffix = b"" if start else _encode(salt)
        try:
            for block_id in block_ids:
                key = pack(parent, *token_ids[start : start + size]) + suffix
                known_block_id = setdefault(key, block_id)
                if known_block_id == block_id and keys[block_id] != key:
                    # A key it has already hangs on a parent that is gone: nothing finds it any more.
                    self.evict([block_id])
                    keys[block_id] = key
                    identities[block_id] = next(self._fresh_identities)
                parent, suffix = identities[known_block_id], b""
                start += size
        except PackError as error:
            raise ValueError(_NOT_PACKED) from error
        return parent

    def evict(self, block_ids: Sequence[int]) -> int:
        """Forgets what the blocks hold; how many of them could be found until now."""
        keys = self.keys
        num_evicted = 0
        for block_id in block_ids:
            key = keys[block_id]
            if key is not None:
                del self._key_to_block_id[key]
                keys[block_id] = None
                num_evicted += 1
        return num_evicted

    def clear(self) -> None:
        """Forgets everything; identities go on growing."""
        self._key_to_block_id.clear()
        self.keys[:] = [None] * len(self.keys)

    def inconsistencies(self) -> list[str]:
        """What does not hold although it always should; O(number of blocks)."""
        key_to_block_id = {key: block_id for block_id, key in enumerate(self.keys) if key is not None}
        problems = [] if key_to_block_id == self._key_to_block_id else ["the map and the keys of the blocks differ"]
        identities = [self._identities[block_id] for block_id in key_to_block_id.values()]
        if len(set(identities)) != len(identities) or ROOT_IDENTITY in identities:
            problems.append("two cached contents share an identity")
        return problems


def _encode(salt: str) -> bytes:
    return salt.encode("utf-8", "surrogatepass")
