"""Keys share a bounded table: none loses a row to one that has more."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_engine_client.prediction import FirstToken
from llmstack_server.state import recent_requests
from llmstack_server.state.first_tokens import PendingRequest
from llmstack_server.state.recent_requests import RecentRequests
from llmstack_server.state.shared_table import SharedTable
from llmstack_server.state.slow_readers import SlowReaders

PUTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 6)), max_size=40)


@given(PUTS, st.integers(1, 6), st.integers(0, 15))
def test_both_limits_hold_and_the_tenant_with_the_most_loses_its_oldest_row(
    puts: list[tuple[str, int, int]], max_rows: int, max_size: int
) -> None:
    table: SharedTable[tuple[str, int]] = SharedTable(max_rows, max_size)
    for tenant, number, size in puts:
        before = [(name, row) for name, row in table.items() if name != f"{tenant}{number}"]
        table.put(f"{tenant}{number}", tenant, (tenant, size), size)
        after = list(table.items())
        assert len(after) <= max_rows
        assert not max_size or sum(row[1] for _, row in after) <= max_size
        whole = [*before, (f"{tenant}{number}", (tenant, size))]
        assert after == [one for one in whole if one in after]
        for name in "abc":
            assert list(table.of(name)) == [row for _, row in after if row[0] == name]
        gone = [row for _, row in whole if (_, row) not in after]
        if not max_size and gone:
            had = Counter(row[0] for _, row in whole)
            assert had[gone[0][0]] == max(had.values())


def test_predictions_and_slow_readers_of_one_key_do_not_end_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_requests, "MAX_KEPT", 4)
    monkeypatch.setattr("llmstack_server.state.slow_readers.MAX_STREAMS", 4)
    predictions, readers = RecentRequests(clock=lambda: 1.0), SlowReaders()
    for tenant, number in [("quiet", 0), ("quiet", 1), *(("loud", number) for number in range(9))]:
        request = PendingRequest(1, tenant, None, submitted_s=1.0, prediction=FirstToken(0.0, 0.5))
        predictions.note(f"{tenant}{number}", request)
        readers.note(f"{tenant}{number}", tenant, 1.0)
    assert [row[1] for row in predictions.rows(9.0)] == ["quiet0", "quiet1", "loud7", "loud8"]
    assert [readers.waited_s(name) for name in ("quiet0", "loud6", "loud8")] == [1.0, None, 1.0]
