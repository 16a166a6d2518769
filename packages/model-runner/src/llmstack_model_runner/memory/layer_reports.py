"""Progress within a step, which each layer reports when it takes its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llmstack_model_runner.layers.attention_metadata import LayerCache


class ReportingCaches(list[LayerCache]):
    """The KV caches of the layers; taking one is a report.

    Every model takes them layer by layer, in eager steps and while a graph is captured. Kernels are compiled by the
    layers that call them first. A replayed graph takes none, and is as fast as the step before.
    """

    def __init__(self, caches: list[LayerCache], report: Callable[[], None]) -> None:
        super().__init__(caches)
        self._report = report

    def __iter__(self) -> Iterator[LayerCache]:
        for cache in super().__iter__():
            self._report()
            yield cache

    def __getitem__(self, index: Any) -> Any:
        self._report()
        return super().__getitem__(index)


class LayerReports:
    """Reports of the layers of one model runner; silent until someone listens.

    Attributes:
        listener: Is called at each layer of a step that is no replay, on the thread of the step.
    """

    def __init__(self) -> None:
        self.listener: Callable[[], None] | None = None

    def over(self, caches: list[LayerCache]) -> list[LayerCache]:
        """The caches of the layers; taking one is a report."""
        return ReportingCaches(caches, self._report)

    def _report(self) -> None:
        if self.listener is not None:
            self.listener()
