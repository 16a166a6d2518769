"""A bounded table that API keys share: each loses its own rows first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

Row = TypeVar("Row")


class SharedTable(Generic[Row]):
    """Rows of requests by their ids, with two limits: on their number, and on the sum of their sizes.

    Beyond a limit the oldest row goes of the tenant that has the most of what is limited, so that no tenant loses a
    row while another one has more than it. Linear in the tenants at a limit, else constant.
    """

    def __init__(self, max_rows: int, max_size: int = 0) -> None:
        """`max_size`: 0 for no limit on the sizes."""
        self._max_rows, self._max_size = max_rows, max_size
        self._rows: dict[str, tuple[str, int, Row]] = {}
        self._tenant_to_ids: dict[str, dict[str, None]] = {}
        self._num_rows: Counter[str] = Counter()
        self._sizes: Counter[str] = Counter()
        self._size = 0

    def put(self, request_id: str, tenant: str, row: Row, size: int = 0) -> None:
        """Keeps a row as the newest one."""
        if request_id in self._rows:
            self._remove(request_id)
        self._rows[request_id] = tenant, size, row
        self._tenant_to_ids.setdefault(tenant, {})[request_id] = None
        self._num_rows[tenant] += 1
        self._sizes[tenant] += size
        self._size += size
        while len(self._rows) > self._max_rows:
            self._remove_oldest(self._num_rows)
        while self._max_size and self._size > self._max_size:
            self._remove_oldest(self._sizes)

    def get(self, request_id: str) -> Row | None:
        """The row of a request, if it is kept."""
        kept = self._rows.get(request_id)
        return None if kept is None else kept[2]

    def items(self) -> Iterator[tuple[str, Row]]:
        """Ids and rows, the oldest first."""
        return ((request_id, row) for request_id, (_, _, row) in self._rows.items())

    def of(self, tenant: str) -> Iterator[Row]:
        """The rows of a tenant, the oldest first."""
        return (self._rows[request_id][2] for request_id in self._tenant_to_ids.get(tenant, ()))

    def _remove_oldest(self, shares: Counter[str]) -> None:
        tenant = max(shares, key=shares.__getitem__)
        self._remove(next(iter(self._tenant_to_ids[tenant])))

    def _remove(self, request_id: str) -> None:
        tenant, size, _ = self._rows.pop(request_id)
        del self._tenant_to_ids[tenant][request_id]
        self._num_rows[tenant] -= 1
        self._sizes[tenant] -= size
        self._size -= size
        if not self._tenant_to_ids[tenant]:
            del self._tenant_to_ids[tenant], self._num_rows[tenant], self._sizes[tenant]
