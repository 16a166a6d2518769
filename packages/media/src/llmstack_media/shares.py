"""Shares of tenants in what is bounded."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

NameT = TypeVar("NameT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Shares:
    """Amounts that tenants hold under one limit.

    A tenant holds at most as much as it leaves free: one alone half of all, and there is always something left for the
    next. A server without keys has one tenant, whose name is empty, and no others to leave anything to. Where nothing
    is held, any amount may be, so that no limit stops a thing for ever.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """The amount that all hold."""
        return self._held.total()

    def take(self, tenant: str, amount: int) -> bool:
        """Takes an amount, if the tenant may hold so much more; one that holds nothing may hold what is free."""
        held, own = self.held, self._held[tenant]
        if held and self._limit - held - amount < (own + amount if tenant and own else 0):
            return False
        self._held[tenant] = own + amount
        return True

    def add(self, tenant: str, amount: int) -> None:
        """Counts an amount whatever the limit; one below 0 is given back."""
        self._held[tenant] += amount
        if not self._held[tenant]:
            del self._held[tenant]


class TenantLru(Generic[NameT, ValueT]):
    """Values of tenants by name. Where there are too many, the tenant that has most loses the one used longest ago."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: dict[str, OrderedDict[NameT, ValueT]] = {}
        self._num_values = 0

    def __len__(self) -> int:
        return self._num_values

    def get(self, tenant: str, name: NameT) -> ValueT | None:
        """The value, which is in use again; None where there is none."""
        values = self._values.get(tenant)
        if values is None or name not in values:
            return None
        values.move_to_end(name)
        return values[name]

    def put(self, tenant: str, name: NameT, value: ValueT) -> None:
        """Adds a value or replaces it."""
        values = self._values.setdefault(tenant, OrderedDict())
        self._num_values += name not in values
        values[name] = value
        values.move_to_end(name)
        while self._num_values > self._capacity:
            largest = max(self._values, key=lambda one: len(self._values[one]))
            self._values[largest].popitem(last=False)
            self._num_values -= 1
            if not self._values[largest]:
                del self._values[largest]
