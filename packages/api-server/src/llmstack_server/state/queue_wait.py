"""The predicted wait of a request, from the last reported state of the queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_WAIT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class QueueState:
    """The waiting requests of all engine cores, as far as they are known here.

    Attributes:
        tokens_per_s: Tokens that are admitted per second while requests wait; None before that was measured.
        num_waiting_tokens: Tokens of the waiting requests.
        tenant_to_tokens: The tokens of each tenant; the smallest tenants may be missing.
        quantum: Tokens that a tenant is admitted with in each round; 0 where requests go by arrival.
        age_s: Seconds since the state was reported.
    """

    tokens_per_s: float | None = None
    num_waiting_tokens: int = 0
    tenant_to_tokens: Mapping[str, int] = field(default_factory=dict)
    quantum: int = 0
    age_s: float = 0.0


def predict_wait(state: QueueState, tokens: int, tenant: str) -> float | None:
    """Seconds until a new request of `tokens` tokens would be admitted; None where nothing was measured."""
    if state.tokens_per_s is None:
        return None
    num_tokens = tokens_before(state, tokens, tenant)
    if not num_tokens:
        return 0.0
    if state.tokens_per_s * MAX_WAIT_S <= num_tokens:
        return MAX_WAIT_S
    return max(num_tokens / state.tokens_per_s - state.age_s, 0.0)


def tokens_before(state: QueueState, tokens: int, tenant: str) -> int:
    """Waiting tokens that are admitted before a new request of the tenant.

    In fair shares, while the tenant is admitted with what it has waiting, each other one is admitted with about as
    much, and one quantum more.
    """
    if not state.quantum:
        return state.num_waiting_tokens
    own = state.tenant_to_tokens.get(tenant, 0)
    share = own + tokens + state.quantum
    others = sum(min(number, share) for name, number in state.tenant_to_tokens.items() if name != tenant)
    num_unnamed = max(state.num_waiting_tokens - sum(state.tenant_to_tokens.values()), 0)
    return own + others + num_unnamed
