"""The router: the routing index, the prompts under way, and the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llmstack_engine_client.routing.index import RoutingIndex
from llmstack_engine_client.routing.policy import ReplicaLoad, RoutingPolicy, choose_replica
from llmstack_engine_core.messages.protocol import CacheUpdate
from llmstack_kv_cache.segments import segment_blocks, segment_keys

# The first 131,072 tokens of a prompt or more; hashing them takes about a millisecond.
MAX_SEGMENTS_PER_PROMPT: Final = 1024


@dataclass(slots=True)
class _Routed:
    replica: int
    num_queued_tokens: int
    prompt_number: int
    keys: list[int]


class Router:
    """Chooses a replica for each request. The live client and the simulation use it alike; it reads no clock.

    Attributes:
        policy: How it chooses.
        index: The known content of the replicas' caches.
    """

    def __init__(self, num_replicas: int, policy: RoutingPolicy) -> None:
        self.policy = policy
        self.index = RoutingIndex(num_replicas)
        self._num_replicas = num_replicas
        self._block_size = 0
        self._num_queued_tokens = [0] * num_replicas
        self._num_computed_tokens = [0] * num_replicas
        self._turn = 0
        self._routed: dict[str, _Routed] = {}

    def set_block_size(self, block_size: int) -> None:
        """The tokens per block of all replicas; until it is known nothing counts as cached."""
        self._block_size = block_size

    @property
    def follows_caches(self) -> bool:
        """Whether the policy needs the reports of the replicas' caches."""
        return self.policy is RoutingPolicy.EXACT and self._block_size > 0

    def route(
        self,
        request_id: str,
        token_ids: Sequence[int],
        salt: str,
        num_requests: Sequence[int],
        is_available: Sequence[bool] | None = None,
    ) -> int:
        """The replica for a request, which is noted as under way there.

        Args:
            request_id: By which `begin` and `end` know it.
            token_ids: The tokens of the prompt.
            salt: The salt of the request's tenant.
            num_requests: By replica, those in flight.
            is_available: By replica; None where all are.
        """
        keys: list[int] = []
        if self.follows_caches:
            keys = segment_keys(token_ids, self._block_size, salt, MAX_SEGMENTS_PER_PROMPT)
        size = segment_blocks(self._block_size) * self._block_size if keys else 0
        # The last token is always computed.
        cached = [min(number * size, len(token_ids) - 1) for number in self.index.find(keys)]
        available = is_available or [True] * self._num_replicas
        figures = zip(num_requests, self._num_queued_tokens, self._num_computed_tokens, available, strict=True)
        loads = [ReplicaLoad(*values) for values in figures]
        replica = choose_replica(self.policy, len(token_ids), cached, loads, self._turn)
        self._turn += 1
        num_new_tokens = len(token_ids) - cached[replica]
        self._num_queued_tokens[replica] += num_new_tokens
        self._num_computed_tokens[replica] += num_new_tokens
        self._routed[request_id] = _Routed(replica, num_new_tokens, self.index.expect(replica, keys), keys)
        return replica

    def begin(self, request_id: str) -> None:
        """The request has its first token."""
        routed = self._routed.get(request_id)
        if routed is not None and routed.num_queued_tokens:
            self._num_queued_tokens[routed.replica] -= routed.num_queued_tokens
            routed.num_queued_tokens = 0

    def end(self, request_id: str) -> None:
        """The request has ended, in whatever way. Unknown ones are ignored."""
        self.begin(request_id)
        routed = self._routed.pop(request_id, None)
        if routed is not None:
            self.index.settle(routed.replica, routed.prompt_number, routed.keys)

    def apply(self, replica: int, update: CacheUpdate) -> bool:
        """Takes what a replica has reported; False where a report is missing, so that the replica must begin again."""
        return self.index.apply(replica, update)

    def restart(self, replica: int) -> None:
        """The replica is another one from now on: with an empty cache, and as if it had computed as much as others."""
        self.index.clear(replica)
        others = [count for other, count in enumerate(self._num_computed_tokens) if other != replica]
        self._num_computed_tokens[replica] = max(self._num_computed_tokens[replica], min(others, default=0))
