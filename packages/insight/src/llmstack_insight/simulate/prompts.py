"""Token ids for the prompts of a trace.

They are made on demand, and shared as the trace says.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_insight.simulate.traces import TOKENS_PER_HASH_ID, TraceRequest

# Token ids have to fit into 31 bits.
MAX_PIECES = (1 << 31) // TOKENS_PER_HASH_ID
# The pieces that most prompts begin with; 512 integers take about 20 kB.
MAX_KEPT_PIECES = 1024


class PromptMaker:
    """Makes the token ids of one trace's prompts.

    Each hash id gets 512 token ids of its own. A prompt without hash ids begins with a token of its own, which is
    enough to make every prefix of it unlike any other.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._num_pieces = 0
        self._kept: dict[int, list[int]] = {}

    def token_ids(self, request: TraceRequest) -> list[int]:
        """The prompt.

        Raises:
            SimulationError: The trace has more different pieces than there are token ids for.
        """
        if request.hash_ids is None:
            return [self._new_number() * TOKENS_PER_HASH_ID] + [0] * (request.num_prompt_tokens - 1)
        token_ids: list[int] = []
        for hash_id in request.hash_ids:
            token_ids += self._piece(hash_id)
        del token_ids[request.num_prompt_tokens :]
        return token_ids

    def _piece(self, hash_id: int) -> Sequence[int]:
        kept = self._kept.get(hash_id)
        if kept is not None:
            return kept
        number = self._numbers.get(hash_id)
        if number is None:
            number = self._numbers[hash_id] = self._new_number()
            return range(number * TOKENS_PER_HASH_ID, (number + 1) * TOKENS_PER_HASH_ID)
        piece = list(range(number * TOKENS_PER_HASH_ID, (number + 1) * TOKENS_PER_HASH_ID))
        if len(self._kept) == MAX_KEPT_PIECES:
            del self._kept[next(iter(self._kept))]  # the oldest
        self._kept[hash_id] = piece
        return piece

    def _new_number(self) -> int:
        self._num_pieces += 1
        if self._num_pieces >= MAX_PIECES:
            raise SimulationError(f"the trace has more than {MAX_PIECES} different pieces of prompts")
        return self._num_pieces


def num_unbounded_blocks(requests: Sequence[TraceRequest], block_size: int, num_concurrent: int) -> int:
    """Blocks with which nothing is ever evicted: one per different prefix, and what runs at the same time.

    Args:
        requests: The trace.
        block_size: Tokens per block.
        num_concurrent: Requests that run at the same time at most.
    """
    prefixes: dict[tuple[int, int], int] = {}
    num_own_blocks = 0
    for request in requests:
        parent = 0
        for hash_id in request.hash_ids or ():
            parent = prefixes.setdefault((parent, hash_id), len(prefixes) + 1)
        if request.hash_ids is None:
            num_own_blocks += request.num_prompt_tokens // block_size
    needs = sorted((request.num_prompt_tokens + request.num_output_tokens for request in requests), reverse=True)
    num_running_blocks = sum(-(-num_tokens // block_size) for num_tokens in needs[:num_concurrent])
    return len(prefixes) * -(-TOKENS_PER_HASH_ID // block_size) + num_own_blocks + num_running_blocks
