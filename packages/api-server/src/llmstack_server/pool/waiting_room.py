"""Requests that wait, or are read, within limits that keys share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmstack_llm.admission.limits import exceeds_share
from llmstack_types import ServerOverloadedError


class WaitingRoom:
    """Requests, and the tokens that they are estimated to have, or their bytes, of each tenant.

    The limits are those of the model's queue, and so is the share of a tenant: the room of one key's requests shrinks
    with what is left to the others.
    """

    def __init__(self, max_num_requests: int | None, max_num_tokens: int | None) -> None:
        self._limits = (
            ("max_num_queued_reqs", max_num_requests, Counter[str]()),
            ("max_num_queued_tokens", max_num_tokens, Counter[str]()),
        )

    @property
    def num_requests(self) -> int:
        """Requests of all tenants."""
        return self._limits[0][2].total()

    @contextmanager
    def place(self, tenant: str, num_tokens: int) -> Iterator[Callable[[int], None]]:
        """Counts one request until the block ends. What it yields adds tokens to it.

        Raises:
            ServerOverloadedError: There is no room for it; so does what it yields.
        """
        self._take(tenant, 1, num_tokens)
        num_held = num_tokens

        def add(num_further: int) -> None:
            nonlocal num_held
            self._take(tenant, 0, num_further)
            num_held += num_further

        try:
            yield add
        finally:
            for (_, _, used), amount in zip(self._limits, (1, num_held), strict=True):
                used[tenant] -= amount
                if not used[tenant]:
                    del used[tenant]

    def _take(self, tenant: str, *amounts: int) -> None:
        for (reason, limit, used), amount in zip(self._limits, amounts, strict=True):
            if limit is None or not amount or not used.total():
                continue  # alone, any length is accepted: otherwise the longest would never run
            num_free = limit - used.total()
            if amount > num_free or (tenant and exceeds_share(amount, num_free, used[tenant])):
                raise ServerOverloadedError("too many requests wait", reason=reason)
        for (_, _, used), amount in zip(self._limits, amounts, strict=True):
            used[tenant] += amount
