"""Plots of measured runs: latency distributions and their course over time."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmstack_bench.comparison import Server
from llmstack_bench.errors import BenchError
from llmstack_bench.plot_html import to_html
from llmstack_bench.plot_panels import Panel, make_panels

SUFFIXES = (".html", ".png")


def check_plot_path(path: Path) -> None:
    """Raises BenchError before the run if the plot could not be written after it."""
    if path.suffix.lower() not in SUFFIXES:
        raise BenchError(f"--plot {path}: must end with {' or '.join(SUFFIXES)}", exit_code=2)
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        reason = "a .png needs matplotlib: pip install 'llmstack-bench[plot]'; a .html needs nothing"
        raise BenchError(f"--plot: {reason}")


def write_plot(path: Path, servers: Sequence[Server]) -> None:
    """Draws all runs of the servers into a file that ends with .html (which needs nothing else) or .png.

    Raises:
        BenchError: The file cannot be written.
    """
    panels = make_panels(servers)
    try:
        if path.suffix.lower() == ".png":
            _write_png(path, panels)
        else:
            path.write_text(to_html(panels), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--plot {path}: {error.strerror}") from error


def _write_png(path: Path, panels: Sequence[Panel]) -> None:
    """Draws the panels side by side with matplotlib, without a display."""
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
