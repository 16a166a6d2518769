"""Turns at work outside of the scheduler, by its round robin over tenants."""

from __future__ import annotations

from llmstack_core_scheduler.tenant_turns import TenantTurns


class FairTurns:
    """Turns of tenants for work whose tokens are known at its end.

    Until then a tenant is charged the quantum. A piece of work has a number, which its caller chooses: they grow.
    """

    def __init__(self, quantum: int) -> None:
        self._turns: TenantTurns[int] = TenantTurns(quantum)
        self._number_to_tenant: dict[int, str] = {}

    def add(self, number: int, tenant: str) -> None:
        """Work of a tenant waits from now on."""
        self._number_to_tenant[number] = tenant
        found = self._turns.tenant(tenant)
        self._turns.will_wait(found)
        found.waiting.append(number)
        self._turns.note_change(found, 0)

    def remove(self, number: int) -> None:
        """Takes out work that still waits."""
        tenant = self._turns.tenants[self._number_to_tenant.pop(number)]
        tenant.waiting.remove(number)
        self._turns.note_change(tenant, 0)

    def begin_next(self) -> int | None:
        """Begins the work whose turn it is, and returns its number; None where none waits."""
        if not self._turns.turns:
            return None
        tenant = self._turns.turns[0][-1]
        number = tenant.waiting.pop(0)
        self._turns.take_turn(tenant)
        self._turns.charge(tenant, self._turns.quantum)
        self._turns.note_change(tenant, 0)
        return number

    def end(self, number: int, num_tokens: int) -> None:
        """Ends work that was begun, and settles what it has cost."""
        self._turns.settle(self._number_to_tenant.pop(number), self._turns.quantum - num_tokens)
