"""Draws panels into a PNG through matplotlib, which is an extra."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmstack_bench.errors import BenchError
from llmstack_bench.plot import Panel


def check_available() -> None:
    """Raises BenchError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        reason = "a .png needs matplotlib: pip install 'llmstack-bench[plot]'; a .html needs nothing"
        raise BenchError(f"--plot: {reason}")


def write_png(path: Path, panels: Sequence[Panel]) -> None:
    """Draws the panels side by side, without a display."""
    # The figure is used directly: pyplot would look for a display and keep every figure alive.
    figure: Any = importlib.import_module("matplotlib.figure").Figure(figsize=(6 * len(panels), 4.5))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, points in panel.series.items():
            x, y = [point[0] for point in points], [point[1] for point in points]
            axes.plot(x, y, label=label, linestyle="-" if panel.is_line else "", marker="" if panel.is_line else ".")
        axes.set(title=panel.title, xlabel=panel.x_title, ylabel=panel.y_title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
