"""Processor time that the constraints of each tenant may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmstack_types import TenantLimitError

CAPACITY_S = 60.0
"""Processor time of one tenant's constraints at once; it grows again by `REFILL_PER_S`."""
REFILL_PER_S = 1.0
RESERVE_S = 20.0
"""Part of the capacity that slow constraints leave to quick ones."""
MAX_TENANTS = 1024


@dataclass(slots=True)
class _Account:
    """The time that is left to one tenant; `reserved_s` belongs to slow constraints that have not ended."""

    left_s: float
    seen_s: float
    reserved_s: float = 0.0


class CompileBudgets:
    """A token bucket of processor time for each tenant. In any t seconds a tenant takes at most
    capacity + refill × t, and the time of the constraints that are running.
    """

    def __init__(self, clock: Callable[[], float], capacity_s: float = CAPACITY_S) -> None:
        self._clock = clock
        self._capacity_s = capacity_s
        self._accounts: dict[str, _Account] = {}

    @property
    def num_tenants(self) -> int:
        """Tenants with an account."""
        return len(self._accounts)

    def used_s(self, tenant: str) -> float:
        """The recent time of a tenant, with the reserved time."""
        account = self._account(tenant)
        return self._capacity_s - account.left_s + account.reserved_s

    def check_quick(self, tenant: str) -> None:
        """Whether the tenant may have a quick constraint compiled.

        Raises:
            TenantLimitError: Its time is used up.
        """
        self._check(self._account(tenant).left_s)

    def reserve(self, tenant: str, seconds: float) -> None:
        """Sets time for a slow constraint aside; `settle` follows.

        Raises:
            TenantLimitError: The tenant has too little left.
        """
        account = self._account(tenant)
        self._check(account.left_s - account.reserved_s - seconds - min(RESERVE_S, self._capacity_s / 3))
        account.reserved_s += seconds

    def settle(self, tenant: str, reserved_s: float, taken_s: float) -> None:
        """Replaces what was reserved by what was taken."""
        account = self._account(tenant)
        account.reserved_s = max(0.0, account.reserved_s - reserved_s)
        account.left_s -= taken_s

    def _check(self, left_s: float) -> None:
        if left_s < 0:
            wait_s = max(1.0, -left_s / REFILL_PER_S)
            message = "The constraints of this API key have used up their time for compilation. Please retry later."
            raise TenantLimitError(message, wait_s=wait_s)

    def _account(self, tenant: str) -> _Account:
        now_s = self._clock()
        account = self._accounts.get(tenant)
        if account is None:
            self._make_room(now_s)
            account = self._accounts[tenant] = _Account(self._capacity_s, now_s)
        self._refill(account, now_s)
        return account

    def _refill(self, account: _Account, now_s: float) -> None:
        gained_s = max(0.0, now_s - account.seen_s) * REFILL_PER_S
        account.left_s = min(self._capacity_s, account.left_s + gained_s)
        account.seen_s = now_s

    def _make_room(self, now_s: float) -> None:
        """Forgets the tenants that have used nothing lately; where all have, the one that has used least."""
        if len(self._accounts) < MAX_TENANTS:
            return
        for account in self._accounts.values():
            self._refill(account, now_s)
        idle = {name: one for name, one in self._accounts.items() if not one.reserved_s}
        full = [name for name, account in idle.items() if account.left_s >= self._capacity_s]
        for name in full or sorted(idle, key=lambda name: -idle[name].left_s)[:1]:
            del self._accounts[name]
