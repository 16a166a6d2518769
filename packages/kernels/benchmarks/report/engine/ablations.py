"""What each part of the engine is worth: the same steps with one of them off."""

from __future__ import annotations

from typing import Any

from report.bench import Bench
from report.engine.decode import HEADLINE, Point, measure_point, num_steps
from report.engine.driver import Decoder
from report.engine.models import BLOCK_SIZE, fitting, started
from report.floors import GPT2, LLAMA_1B, LLAMA_8B, ModelShape
from report.rows import Row

POINTS = (HEADLINE, Point(64, 1024))


def run(bench: Bench) -> None:
    """Graphs, and running ahead. Fusion and dependent launch have no switch, so they are not here."""
    for shape in (LLAMA_1B, LLAMA_8B, GPT2):
        for label, options, is_ahead in (
            ("run-ahead off", {}, False),
            ("graphs off", {"enforce_eager": True}, True),
            ("graphs and run-ahead off", {"enforce_eager": True}, False),
        ):
            if bench.has_time(12):
                title = f"{shape.name}, {label}"
                bench.attempt(title, "ms", lambda s=shape, n=label, o=options, a=is_ahead: _measure(bench, s, n, o, a))  # type: ignore[misc]


def _measure(bench: Bench, shape: ModelShape, label: str, options: dict[str, Any], is_ahead: bool) -> None:
    tiny = fitting(bench, shape)
    batch = bench.pick(max(point.batch for point in POINTS), 2)
    room = Decoder.num_tokens(batch, 1024, 3 * num_steps(bench), BLOCK_SIZE)
    max_model_len = min(tiny.max_model_len, 2048)
    with started(bench, tiny, room, max_model_len=max_model_len, **options) as runner:
        for point in POINTS:
            row = measure_point(bench, runner, tiny, f"{shape.name}, {label},", point, "bf16", is_ahead=is_ahead)
            bench.row(Row(row.name, row.unit, row.measured, row.bound, row.spread, row.note))
