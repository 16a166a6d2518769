"""Our histograms export what `prometheus_client`'s own would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from llmstack_server.observability.histograms import HistogramFamily
from llmstack_server.observability.metric_aliases import render

BOUNDS = (0.001, 0.5, 1.0, 2.5, 100.0)
VALUES = st.lists(st.sampled_from(BOUNDS) | st.floats(0, 1000), max_size=20)


@given(VALUES, VALUES)
def test_the_text_is_that_of_the_library(first: list[float], second: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    family = HistogramFamily("h_seconds", "A text.", ("a", "b"), BOUNDS, ours)
    other = Histogram("h_seconds", "A text.", ("a", "b"), buckets=BOUNDS, registry=theirs)
    for histograms in (family, other):
        for labels in (("x", "y"), ("x", "z")):
            histograms.labels(*labels)
    family.labels("x", "y").observe_all(first)
    for value in first:
        other.labels("x", "y").observe(value)
    for value in second:
        family.labels("x", "z").observe(value)
        other.labels("x", "z").observe(value)
    assert lines(ours) == lines(theirs)


def lines(registry: CollectorRegistry) -> list[tuple[str, object]]:
    """Names and labels with values; sums of many are added up in another order."""
    text = render(registry, has_aliases=False).decode()
    pairs = [line.rpartition(" ")[::2] for line in text.splitlines() if not line.startswith("#")]
    return sorted((name, round(float(value), 6)) for name, value in pairs)


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    HistogramFamily("h", "A text.", (), BOUNDS, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        HistogramFamily("h", "A text.", (), BOUNDS, registry)
