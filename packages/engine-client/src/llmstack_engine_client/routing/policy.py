"""The routing policies, as one function of the replicas' state."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

# Tokens that one more request in flight counts for: its row in each step delays the others by about as much.
REQUEST_TOKENS: Final = 64
# Waiting tokens are computed before those of the request, but a lower weight keeps prefixes together: measured with
# Mooncake's conversations, see docs/scale.md.
QUEUE_WEIGHT: Final = 0.125
# What a replica has computed more than the others: it spreads prefixes where no replica has a queue.
SURPLUS_WEIGHT: Final = 0.02


class RoutingPolicy(StrEnum):
    """The rule by which a replica is chosen."""

    EXACT = "exact"
    """Chooses by the tokens that each replica would have to compute, weighed against its load."""
    LOAD = "load"
    """The one with the fewest requests."""
    ROUND_ROBIN = "round_robin"
    """One after the other."""


class ReplicaLoad(NamedTuple):
    """The state of one replica.

    Attributes:
        num_requests: In flight there.
        num_queued_tokens: Uncached tokens of the prompts that have no first token yet.
        num_computed_tokens: Counter of tokens of prompts that it was given to compute.
        is_available: Whether it computes requests at this moment.
    """

    num_requests: int = 0
    num_queued_tokens: int = 0
    num_computed_tokens: int = 0
    is_available: bool = True


def choose_replica(
    policy: RoutingPolicy, num_tokens: int, num_cached_tokens: Sequence[int], loads: Sequence[ReplicaLoad], turn: int
) -> int:
    """The index of the replica that gets a prompt of `num_tokens` tokens; equally good ones take it in order.

    Args:
        policy: The routing policy.
        num_tokens: The length of the prompt.
        num_cached_tokens: The tokens of the prompt that each replica has cached.
        loads: The load of each replica. If none is available, all count as available.
        turn: How many requests came before, for the policy that takes turns.
    """
    num_replicas = len(loads)
    candidates = [index for index, load in enumerate(loads) if load.is_available] or list(range(num_replicas))
    if policy is RoutingPolicy.ROUND_ROBIN:
        return candidates[turn % len(candidates)]
    if policy is RoutingPolicy.LOAD:
        return min(candidates, key=lambda index: loads[index].num_requests)
    least = min(loads[index].num_computed_tokens for index in candidates)

    def cost(index: int) -> float:
        load = loads[index]
        return (
            num_tokens - num_cached_tokens[index]
            + REQUEST_TOKENS * load.num_requests
            + QUEUE_WEIGHT * load.num_queued_tokens
            + SURPLUS_WEIGHT * (load.num_computed_tokens - least)
        )  # fmt: skip

    return min(candidates, key=cost)
