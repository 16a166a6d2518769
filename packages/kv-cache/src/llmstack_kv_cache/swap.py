"""The blocks of host memory that swapped-out requests hold."""

from __future__ import annotations

from llmstack_kv_cache.errors import UnknownRequestError


class HostBlockPool:
    """A bounded pool of host blocks, each held by one swapped-out request or free.

    Attributes:
        num_blocks: All blocks; their ids are 0 to num_blocks - 1.
        num_swap_outs: Counter of requests swapped out.
        num_swap_ins: Counter of requests swapped in.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_swap_outs = 0
        self.num_swap_ins = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._request_id_to_block_ids: dict[str, list[int]] = {}
        self._request_id_to_salt: dict[str, str] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    @property
    def request_ids(self) -> list[str]:
        """The requests that are swapped out, in their order."""
        return list(self._request_id_to_salt)

    def block_ids(self, request_id: str) -> list[int]:
        """The request's blocks in order.

        Raises:
            UnknownRequestError: The request is not swapped out.
        """
        block_ids = self._request_id_to_block_ids.get(request_id)
        if block_ids is None:
            raise UnknownRequestError(request_id)
        return block_ids

    def take(self, request_id: str, num_blocks: int, salt: str) -> list[int] | None:
        """Gives a request that is not here `num_blocks` blocks, or None."""
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        self._request_id_to_block_ids[request_id] = block_ids
        self._request_id_to_salt[request_id] = salt
        self.num_swap_outs += 1
        return block_ids

    def swap_in(self, request_id: str) -> str:
        """Frees the blocks of a request that is swapped in; its salt."""
        self.num_swap_ins += 1
        return self.release(request_id)

    def release(self, request_id: str) -> str:
        """Frees the host blocks of a swapped-out request, and returns its salt."""
        self._free += self._request_id_to_block_ids.pop(request_id)[::-1]
        return self._request_id_to_salt.pop(request_id)

    def inconsistencies(self) -> list[str]:
        """Violated invariants; O(number of blocks)."""
        held = [block_id for block_ids in self._request_id_to_block_ids.values() for block_id in block_ids]
        if sorted(held + self._free) != list(range(self.num_blocks)):
            return ["the host blocks are not each free or held once"]
        return []
