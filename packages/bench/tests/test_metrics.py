"""The arithmetic of a run."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_bench.errors import BenchError
from llmstack_bench.load import LoadResult
from llmstack_bench.metrics import Goodput, parse_percentiles, percentile, summarise
from llmstack_bench.result import RequestResult

FLOATS = st.floats(0, 1e6, allow_nan=False)


def answered(ttft_s: float, gaps_s: list[float], start_s: float = 0.0, num_prompt_tokens: int = 10) -> RequestResult:
    """A request whose tokens came one by one."""
    return RequestResult(
        start_s=start_s,
        ttft_s=ttft_s,
        e2e_s=ttft_s + sum(gaps_s),
        token_gaps_s=gaps_s,
        num_chunks=len(gaps_s) + 1,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=len(gaps_s) + 1,
        has_usage=True,
    )


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([7.0], 99, 7.0), ([1, 2, 3, 4], 50, 2.5), ([4, 1, 3, 2], 25, 1.75), ([1, 2], 90, 1.9), ([1, 2, 3], 100, 3)],
)
def test_percentiles_are_interpolated_between_the_two_nearest(values: list[float], percent: float, expected: float):
    assert percentile(values, percent) == pytest.approx(expected)


@given(st.lists(FLOATS, min_size=1, max_size=50), FLOATS.map(lambda x: x % 100), FLOATS.map(lambda x: x % 100))
def test_percentiles_lie_within_the_values_and_grow_with_the_percentage(values: list[float], one: float, two: float):
    low, high = sorted((one, two))
    assert min(values) <= percentile(values, low) <= percentile(values, high) <= max(values)
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


@given(st.lists(FLOATS, min_size=2, max_size=50, unique=True), st.floats(1, 99))
def test_percentiles_agree_with_the_standard_librarys_inclusive_quantiles(values: list[float], percent: float):
    whole = round(percent)
    expected = statistics.quantiles(values, n=100, method="inclusive")[whole - 1]
    assert percentile(values, whole) == pytest.approx(expected)


def test_the_servers_processor_time_is_shared_among_the_tokens_that_it_sent():
    load = LoadResult([answered(0.1, [0.1]), answered(0.1, [0.1, 0.1])], 1.0)
    values = summarise(load, server_cpu_s=0.4).values
    assert (values["server_cpu_s"], values["server_cpu_ms_per_token"]) == (0.4, pytest.approx(80.0))
    assert "server_cpu_s" not in summarise(load).values


def test_predictions_of_first_tokens_are_right_within_a_quarter_or_50_ms():
    results = [answered(ttft_s, []) for ttft_s in (0.06, 0.02, 1.25, 0.7, 5.0)]
    for result, said_s in zip(results, (0.01, 0.08, 1.0, 1.0, None), strict=True):
        result.predicted_ttft_s = said_s
    values = summarise(LoadResult(results, 1.0)).values
    assert (values["predicted_ttfts"], values["predicted_ttft_fraction"]) == (4, 0.5)
    assert "predicted_ttft_fraction" not in summarise(LoadResult(results[-1:], 1.0)).values


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_a_percentile_of_nothing_is_an_error(values: list[float], percent: float):
    with pytest.raises(ValueError):
        percentile(values, percent)


def test_time_per_output_token_leaves_the_first_token_out():
    result = answered(0.5, [0.1, 0.3])
    assert result.e2e_s == pytest.approx(0.9)
    assert result.tpot_s == pytest.approx(0.2)
    assert answered(0.5, []).tpot_s is None


def test_a_summary_of_two_answers_and_a_failure():
    failed = RequestResult(start_s=1.0, e2e_s=0.2, error="HTTP 429: full")
    load = LoadResult([answered(0.1, [0.02, 0.04]), answered(0.3, [0.04, 0.06]), failed], 2.0)
    summary = summarise(load, (50, 100), Goodput({"ttft": 200}))
    values = summary.values
    assert (values["completed"], values["failed"]) == (2, 1)
    assert summary.failures == {"HTTP 429: full": 1}
    assert (values["total_input_tokens"], values["total_output_tokens"]) == (20, 6)
    assert (values["request_throughput"], values["output_throughput"]) == (1.0, 3.0)
    assert (values["input_throughput"], values["total_token_throughput"]) == (10.0, 13.0)
    assert values["mean_ttft_ms"] == pytest.approx(200)
    assert values["p100_ttft_ms"] == pytest.approx(300)
    assert values["median_itl_ms"] == pytest.approx(40)
    assert values["mean_tpot_ms"] == pytest.approx(40)
    assert values["p50_e2el_ms"] == pytest.approx(280)
    assert values["request_goodput"] == 0.5
    assert values["goodput_fraction"] == pytest.approx(1 / 3)


def test_goodput_needs_every_target():
    goodput = Goodput.parse(["ttft:200 tpot:50", "e2el:1000"])
    assert goodput.targets_ms == {"ttft": 200, "tpot": 50, "e2el": 1000}
    assert goodput.is_met(answered(0.2, [0.04, 0.05]))
    assert not goodput.is_met(answered(0.201, [0.05, 0.05]))
    assert not goodput.is_met(answered(0.2, [0.05, 0.06]))
    assert not goodput.is_met(answered(0.2, [0.045] * 18))
    assert goodput.is_met(answered(0.2, []))  # a single token has no time per token
    assert not goodput.is_met(RequestResult(error="gone"))


@given(st.lists(st.tuples(FLOATS, st.lists(FLOATS, max_size=4), st.booleans()), min_size=1, max_size=20), FLOATS)
def test_goodput_is_a_share_that_falls_with_the_target(rows: list[tuple[float, list[float], bool]], target: float):
    results = [answered(ttft, gaps) if ok else RequestResult(error="x") for ttft, gaps, ok in rows]
    share, tighter = (
        summarise(LoadResult(results, 1.0), goodput=Goodput({"e2el": limit})).values["goodput_fraction"]
        for limit in (target + 1, (target + 1) / 2)
    )
    assert 0 <= tighter <= share <= sum(result.error is None for result in results) / len(results)


def test_a_run_without_an_answer_has_rates_of_zero_and_no_latencies():
    values = summarise(LoadResult([RequestResult(error="x")], 0.0)).values
    assert values["output_throughput"] == 0
    assert not [name for name in values if "ttft" in name]


def test_missing_usage_and_large_chunks_are_said():
    silent = answered(0.1, [0.1])
    silent.has_usage = False
    batched = answered(0.1, [0.1])
    batched.num_output_tokens = 20
    notes = summarise(LoadResult([silent, batched], 1.0)).notes
    assert "1 answers had no usage" in notes[0]
    assert "5.50 tokens" in notes[1]


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "ttft:0", "itl:3", ":5", "e2el:inf"])
def test_a_malformed_target_is_an_error_that_names_it(text: str):
    with pytest.raises(BenchError, match="--goodput"):
        Goodput.parse([text])


def test_percentiles_of_a_flag_are_numbers_from_0_to_100():
    assert parse_percentiles("99,50,99.9,50") == (50, 99, 99.9)
    for text in ("101", "a", "50,", "-1"):
        with pytest.raises(BenchError, match="--metric-percentiles"):
            parse_percentiles(text)
