"""Servers side by side: order, medians, ratios, tables and pictures."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_bench.comparison import Run, Server, measure_interleaved, ratios
from llmstack_bench.errors import BenchError
from llmstack_bench.load import LoadResult
from llmstack_bench.metrics import RunSummary, summarise
from llmstack_bench.plot import check_plot_path, write_plot
from llmstack_bench.plot_html import ticks
from llmstack_bench.plot_panels import MAX_POINTS, cumulative, make_panels, thinned
from llmstack_bench.report import format_report
from llmstack_bench.result import RequestResult
from llmstack_bench.table import format_number, format_table


def server(label: str, *throughputs: float) -> Server:
    runs = [Run(LoadResult([], 1.0), RunSummary({"output_throughput": value})) for value in throughputs]
    return Server(label, f"http://{label}", "m", runs)


def measured(label: str, ttft_s: float) -> Server:
    results = [RequestResult(n / 10, 0, ttft_s, ttft_s + 0.4, [0.1, 0.3], 3, 10, 3, True) for n in range(5)]
    results.append(RequestResult(error="HTTP 500: oh <no>"))
    load = LoadResult(results, 2.0)
    return Server(label, "http://x", "m", [Run(load, summarise(load), 12.5)])


async def test_repetitions_are_interleaved_and_their_order_turns_around():
    servers, order = [Server("a", ""), Server("b", "")], []

    async def measure(one: Server, repetition: int) -> Run:
        order.append((one.label, repetition))
        return Run(LoadResult([], 0.0), RunSummary({}))

    await measure_interleaved(servers, 3, measure)
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [len(one.runs) for one in servers] == [3, 3]


def test_ratios_are_medians_of_neighbours_not_ratios_of_medians():
    first, second = server("a", 100, 10, 50), server("b", 200, 10, 75)
    assert first.medians() == {"output_throughput": 50}
    assert ratios(second, first) == {"output_throughput": 1.5}
    assert second.to_json(first)["ratio_to_first"] == {"output_throughput": 1.5}
    assert ratios(server("c", 1.0), server("d", 0.0)) == {}


def test_the_report_shows_every_server_its_ratio_its_failures_and_the_memorys_speed():
    text = format_report([measured("ours", 0.1), measured("theirs", 0.3)], (50, 90, 99))
    lines = text.splitlines()
    assert lines[0].split() == ["result", "ours", "theirs", "theirs/ours"]
    row = next(line for line in lines if line.startswith("time to first token p50 (ms)"))
    assert row.split()[-3:] == ["100", "300", "3.00"]
    assert "failed (ours): 1 x HTTP 500: oh <no>" in lines
    assert "memory read before each run (theirs): 12.5 GB/s" in lines
    assert "good requests/s" not in text


def test_a_report_shows_only_the_metrics_asked_for():
    text = format_report([measured("ours", 0.1)], (99,), ("itl",))
    assert "inter-token latency p99 (ms)" in text
    assert "first token" not in text


def test_numbers_keep_the_digits_that_matter():
    assert [format_number(value) for value in (None, 64.0, 0.123, 12.345, 123.45, 12345.6)] == [
        "-", "64", "0.12", "12.35", "123.5", "12346",
    ]  # fmt: skip


def test_columns_are_aligned():
    table = format_table(["name", "x"], [["a", "1"], ["longer", "22"]])
    assert table.splitlines() == ["name     x", "----------", "a        1", "longer  22"]


def test_records_are_written_only_when_asked_for():
    one = measured("a", 0.1)
    assert "requests" not in one.to_json(one)["runs"][0]
    detailed = one.to_json(one, is_detailed=True)["runs"][0]
    assert len(detailed["requests"]) == 6
    assert detailed["requests"][5]["error"] == "HTTP 500: oh <no>"
    assert detailed["memory_read_gb_per_s"] == 12.5


def test_a_page_is_one_file_with_a_drawing_per_panel(tmp_path: Path):
    path = tmp_path / "p.html"
    write_plot(path, [measured("a <b>", 0.1), measured("c", 0.3)])
    text = path.read_text()
    assert "a &lt;b&gt;" in text
    assert "http" not in text
    drawings = text.split("<svg")[1:]
    assert len(drawings) == 3
    for drawing in drawings:
        root = ElementTree.fromstring("<svg" + drawing.split("</svg>")[0] + "</svg>")
        numbers = [
            float(n)
            for line in root.iter("polyline")
            for pair in line.get("points", "").split()
            for n in pair.split(",")
        ]
        assert all(0 <= number <= 560 for number in numbers)
    assert text.count("<polyline") == 4
    assert text.count("<circle") == 10


def test_a_page_of_servers_without_answers_can_be_drawn(tmp_path: Path):
    write_plot(tmp_path / "p.html", [server("a", 1.0)])
    assert (tmp_path / "p.html").read_text().count("<svg") == 3


def test_a_png_is_drawn_where_matplotlib_is_installed(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    path = tmp_path / "p.png"
    check_plot_path(path)
    write_plot(path, [measured("a", 0.1)])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_png_without_matplotlib_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"llmstack-bench\[plot\]"):
        check_plot_path(Path("p.png"))


def test_a_picture_of_another_kind_is_refused():
    with pytest.raises(BenchError, match=r"\.html or \.png"):
        check_plot_path(Path("p.gif"))


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path):
    with pytest.raises(BenchError, match="No such file"):
        write_plot(tmp_path / "absent" / "p.html", [measured("a", 0.1)])


def test_distributions_rise_to_one():
    assert cumulative([3.0, 1.0]) == [(1.0, 0.5), (3.0, 1.0)]
    assert cumulative([]) == []
    assert make_panels([measured("a", 0.1)])[0].title == "Time to first token"


def test_many_points_are_thinned_and_their_ends_stay():
    points = [(float(n), float(n)) for n in range(10_000)]
    few = thinned(points)
    assert len(few) == MAX_POINTS
    assert (few[0], few[-1]) == (points[0], points[-1])


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_reach_the_highest_value(high: float):
    found = ticks(high)
    assert found[0] == 0
    assert found[-1] >= high * (1 - 1e-6)
    assert 2 <= len(found) <= 7
