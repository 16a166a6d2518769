"""Plots as one HTML page of inline SVG, without scripts or other files."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from llmstack_bench.plot_panels import Panel

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 46
# Distinguishable for colour-blind readers (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLE = "body{font:14px system-ui,sans-serif;margin:2em}svg{margin:0 1em 1em 0}text{font:11px system-ui,sans-serif}"


def to_html(panels: Sequence[Panel]) -> str:
    """A page of all panels, with a legend."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.series))
    colours = {label: COLOURS[index % len(COLOURS)] for index, label in enumerate(labels)}
    legend = " ".join(
        f'<span style="color:{colour}">&#9632;</span> {html.escape(label)}' for label, colour in colours.items()
    )
    drawings = "\n".join(_svg(panel, colours) for panel in panels)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>llmstack bench</title><style>{STYLE}</style>\n'
        f"<h1>llmstack bench serve</h1><p>{legend}</p>\n{drawings}\n</html>\n"
    )


def ticks(high: float, num_ticks: int = 5) -> list[float]:
    """Round numbers from 0 to at least `high`."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / num_ticks
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [index * step for index in range(math.ceil(high / step - 1e-9) + 1)]


def _svg(panel: Panel, colours: dict[str, str]) -> str:
    points = [point for series in panel.series.values() for point in series]
    x_ticks = ticks(max((x for x, _ in points), default=0.0))
    y_ticks = ticks(max((y for _, y in points), default=0.0))

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / x_ticks[-1] * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - y / y_ticks[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{html.escape(panel.title)}">']
    parts.append(_text(LEFT, 18, panel.title, "start", "font-weight:bold"))
    for tick in x_ticks:
        x, y = place(tick, 0)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(x, y + 15, f"{tick:g}", "middle"))
    for tick in y_ticks:
        x, y = place(0, tick)
        parts.append(f'<line x1="{x:.1f}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(x - 6, y + 4, f"{tick:g}", "end"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 8, panel.x_title, "middle"))
    parts.append(_text(WIDTH - RIGHT, 18, panel.y_title, "end"))
    for label, series in panel.series.items():
        parts.append(_series([place(x, y) for x, y in series], colours[label], is_line=panel.is_line))
    return "\n".join([*parts, "</svg>"])


def _series(points: Sequence[tuple[float, float]], colour: str, *, is_line: bool) -> str:
    if is_line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
    return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>' for x, y in points)


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    attribute = f' style="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attribute}>{html.escape(text)}</text>'
