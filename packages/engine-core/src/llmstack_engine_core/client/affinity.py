"""Map from prompt prefixes to engine cores.

The engine core that computed a prefix may still have it cached.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Final

from llmstack_types import EngineCoreRequest

# Prefixes of these lengths are distinguished; a shorter prompt is computed faster than it is found.
PREFIX_LENGTHS: Final = (64, 256, 1024, 4096, 16_384)
MAX_PREFIXES: Final = 65_536


class PrefixAffinity:
    """Maps beginnings of prompts to the engine core that got them last; the least recently used are forgotten.

    It only ever prefers: a beginning that is taken for another (equal hashes), or that the cache has evicted, costs
    nothing but the preference.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._prefix_to_index: OrderedDict[int, int] = OrderedDict()

    def find(self, prefixes: list[int]) -> int | None:
        """The engine core that got the longest known one of `prefixes`."""
        for prefix in reversed(prefixes):
            index = self._prefix_to_index.get(prefix)
            if index is not None:
                return index
        return None

    def note(self, prefixes: list[int], index: int) -> None:
        """An engine core gets a prompt with these beginnings."""
        for prefix in prefixes:
            self._prefix_to_index[prefix] = index
            self._prefix_to_index.move_to_end(prefix)
        while len(self._prefix_to_index) > self._max_prefixes:
            self._prefix_to_index.popitem(last=False)

    def clear(self) -> None:
        """The caches are empty."""
        self._prefix_to_index.clear()


def prefixes_of(request: EngineCoreRequest) -> list[int]:
    """Hashes of the prompt's beginnings that its tenant may share, shortest first."""
    lengths = [length for length in PREFIX_LENGTHS if length <= len(request.prompt_token_ids)]
    if not lengths:
        return []
    packed = array("I", request.prompt_token_ids[: lengths[-1]]).tobytes()
    owner = (request.cache_salt, request.lora_name)
    return [hash((owner, packed[: 4 * length])) for length in lengths]
