"""Histograms for hundreds of values per step: one bisection per value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class Histogram:
    """The observations of one set of labels, for use by one thread: there is no lock.

    The histogram of `prometheus_client` locks for each value and scans the bounds, which takes 15 times as long.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: Upper ends of the buckets, ascending, without the infinite one."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Adds one value to its bucket."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Adds each value to its bucket."""
        bounds, counts = self._bounds, self._counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.sum += sum(values)

    def cumulative_buckets(self) -> list[tuple[str, float]]:
        """Upper ends as text, each with the number of values at or below it."""
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(ends, map(float, accumulate(self._counts)), strict=True))


class HistogramFamily:
    """One metric with a histogram per set of labels; a collector of `prometheus_client`."""

    def __init__(
        self, name: str, text: str, label_names: Sequence[str], bounds: Iterable[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._label_names = tuple(label_names)
        self._bounds = tuple(map(float, bounds))
        self._labels_to_histogram: dict[tuple[str, ...], Histogram] = {}
        registry.register(self)

    def labels(self, *values: str) -> Histogram:
        """The histogram for these label values, in the order of the label names."""
        histogram = self._labels_to_histogram.get(values)
        if histogram is None:
            histogram = self._labels_to_histogram[values] = Histogram(self._bounds)
        return histogram

    def describe(self) -> Iterator[Metric]:
        """The family without its values, for the registry's check of names."""
        yield HistogramMetricFamily(self._name, self._text, labels=self._label_names)

    def collect(self) -> Iterator[Metric]:
        """The family with its values."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        for values, histogram in self._labels_to_histogram.items():
            family.add_metric(values, histogram.cumulative_buckets(), histogram.sum)
        yield family
