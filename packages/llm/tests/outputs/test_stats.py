"""The log line per interval."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm.outputs.stats import IterationStats, LoggingStatLogger
from llmstack_types import EngineReady, SchedulerStats


def test_one_line_per_interval_with_rates_and_state(caplog: pytest.LogCaptureFixture):
    now = [0.0]
    stat_logger = LoggingStatLogger(interval_s=10.0, clock=lambda: now[0])
    stats = SchedulerStats(
        num_running=3, num_waiting=2, num_free_blocks=5, num_blocks=10, prefix_cache_queries=8, prefix_cache_hits=2
    )
    with caplog.at_level(logging.INFO):
        stat_logger.log_engine_initialized(EngineReady(10, 16, 128, 257, "float32", "cpu"))
        for now[0] in (1.0, 5.0, 10.0):
            stat_logger.record(stats, IterationStats(num_prompt_tokens=10, num_generation_tokens=20))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[1] == (
        "prompt 3.0 tokens/s, generation 6.0 tokens/s, running 3, waiting 2, KV cache 50.0%, hits 25.0%"
    )


def test_it_works_where_the_engine_core_keeps_no_statistics(caplog: pytest.LogCaptureFixture):
    now = [0.0]
    stat_logger = LoggingStatLogger(interval_s=1.0, clock=lambda: now[0])
    now[0] = 2.0
    with caplog.at_level(logging.INFO):
        stat_logger.record(None, IterationStats(num_generation_tokens=4))
    assert "generation 2.0 tokens/s" in caplog.text


def test_the_last_line_of_a_burst_comes_without_another_step(caplog: pytest.LogCaptureFixture):
    now = [0.0]
    stat_logger = LoggingStatLogger(interval_s=10.0, clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        now[0] = 1.0
        stat_logger.record(None, IterationStats(num_generation_tokens=40))
        for now[0] in (5.0, 10.0, 20.0, 30.0):
            stat_logger.tick()
    assert len(caplog.records) == 1  # quiet while nothing happens
    assert "generation 4.0 tokens/s" in caplog.text


def test_several_engines_have_one_line(caplog: pytest.LogCaptureFixture):
    now = [0.0]
    stat_logger = LoggingStatLogger(interval_s=1.0, clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        for index, num_running in enumerate((3, 4)):
            stats = SchedulerStats(num_running=num_running, num_free_blocks=5 * index, num_blocks=10)
            stat_logger.record(stats, IterationStats(num_generation_tokens=10, engine_index=index))
        now[0] = 1.0
        stat_logger.tick()
    assert "generation 20.0 tokens/s, running 7, waiting 0, KV cache 75.0%" in caplog.text


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 1), st.integers(1, 50), st.floats(0, 1), st.sampled_from(["step", "loss"])),
            min_size=1,
        ),
        min_size=1,
    )
)
def test_the_hit_rate_is_that_of_the_interval_whatever_engine_cores_are_replaced(
    intervals: list[list[tuple[int, int, float, str]]],
):
    """Totals of an engine core that takes the place of another one begin at 0, as its steps do."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    stats_logger, now = logging.getLogger("llmstack_llm.outputs.stats"), [0.0]
    stat_logger = LoggingStatLogger(interval_s=1.0, clock=lambda: now[0])
    engines = [SchedulerStats(), SchedulerStats()]
    stats_logger.addHandler(handler)
    stats_logger.setLevel(logging.INFO)
    try:
        for number, interval in enumerate(intervals, 1):
            num_queries = num_hits = 0
            for index, queries, share, kind in interval:
                if kind == "loss":  # the client reports that nothing is running
                    engines[index] = SchedulerStats()
                    stat_logger.record(engines[index], IterationStats(num_prompt_tokens=1, engine_index=index))
                last, hits = engines[index], int(queries * share)
                engines[index] = last._replace(
                    step=last.step + 1, prefix_cache_queries=last.prefix_cache_queries + queries,
                    prefix_cache_hits=last.prefix_cache_hits + hits,
                )  # fmt: skip
                num_queries, num_hits = num_queries + queries, num_hits + hits
                stat_logger.record(engines[index], IterationStats(num_prompt_tokens=1, engine_index=index))
            now[0] = float(number)
            stat_logger.tick()
            assert lines[-1].endswith(f"hits {100 * num_hits / num_queries:.1f}%")
    finally:
        stats_logger.removeHandler(handler)
        stats_logger.setLevel(logging.NOTSET)
