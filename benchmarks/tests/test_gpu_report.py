"""The report of a GPU: its arithmetic, its budget, and that all of its code runs where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_report
import pytest
import torch
from report import timing, worker
from report.bench import Bench, BrokenDeviceError
from report.blocks import Block, fits
from report.journal import Journal, Results
from report.plan import PLAN
from report.rows import Row

BENCHMARKS = Path(__file__).resolve().parents[1]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


@pytest.fixture
def bench(journal: Journal) -> Bench:
    return Bench(journal, is_smoke=True)


# --- floors ---


# --- journal ---


def test_a_journal_gives_back_what_was_written_but_for_half_a_line(journal: Journal) -> None:
    journal.write("header", card="a card")
    journal.write("ceiling", name="read GB/s", value=4300.0)
    journal.write("start", block="first", at_s=1.0)
    journal.write("row", block="first", name="row", unit="ms", measured=2.0, bound=1.0, spread=None, note="")
    journal.write("end", block="first", outcome="done", seconds=3.0)
    journal.write("start", block="second", at_s=5.0)
    with journal.path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "end", "blo')
    results = Results.read(journal)
    assert results.header == {"card": "a card"}
    assert results.ceilings == {"read GB/s": 4300.0}
    assert results.rows == [("first", Row("row", "ms", 2.0, 1.0))]
    assert results.outcomes == {"first": "done"}
    assert results.under_way == ("second", 5.0)
    assert results.to_json()["rows"][0]["percent"] == 50.0


def test_a_row_that_failed_hides_no_figure(journal: Journal) -> None:
    for measured in (2.0, None):
        journal.write("row", block="b", name="row", unit="ms", measured=measured, bound=None, spread=None, note="")
    assert Results.read(journal).by_name()["row"].measured == 2.0


def unmeasured_on_this_processor() -> set[str]:
    """Rows that PyTorch cannot compute here: products of fp8 need more than AVX2 on a processor."""
    matrix = torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(matrix, matrix.t(), torch.ones(()), torch.ones(()), out_dtype=torch.bfloat16)
    except RuntimeError:
        return {"fp8 product TFLOP/s"}
    return set()


# --- blocks, worker, supervisor ---


def test_a_block_fits_if_its_whole_cost_is_left() -> None:
    block = Block("block", 10, "nowhere:run")
    assert fits(block, 10)
    assert not fits(block, 9.9)
    assert block.limit_s > block.cost_s


def test_a_failing_block_is_a_result_and_the_next_one_runs(
    bench: Bench, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(bad=lambda _: 1 / 0, good=lambda b: b.row(Row("good", "ms", 1.0)))
    monkeypatch.setitem(sys.modules, "report_test_blocks", module)
    blocks = [Block(name, 1, f"report_test_blocks:{name}") for name in ("bad", "absent", "good")]
    assert worker.run_blocks(bench, journal, blocks) == 0
    results = Results.read(journal)
    assert results.outcomes["bad"].startswith("failed: ZeroDivisionError")
    assert results.outcomes["absent"].startswith("failed: AttributeError")
    assert results.outcomes["good"] == "done"
    assert results.rows == [("good", Row("good", "ms", 1.0, note="a smoke run: the figure means nothing"))]


def test_a_row_that_cannot_be_measured_says_why_and_others_go_on(bench: Bench, journal: Journal) -> None:
    assert bench.attempt("bad", "ms", lambda: Row("bad", "ms", 1 / 0)) is None
    assert bench.attempt("good", "ms", lambda: Row("good", "ms", 2.0)) is not None
    (_, bad), (_, good) = Results.read(journal).rows
    assert (bad.measured, bad.note) == (None, "failed: ZeroDivisionError: division by zero")
    assert good.measured == 2.0


def test_blocks_without_time_are_named_as_dropped(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(run=lambda _: None)
    monkeypatch.setitem(sys.modules, "report_test_blocks", module)
    bench = Bench(journal, is_smoke=True, deadline_s=time.monotonic() + 100)
    bench.is_smoke = False
    bench.device = torch.device("cpu")
    blocks = [Block(name, cost, "report_test_blocks:run") for name, cost in (("dear", 1000), ("cheap", 1))]
    worker.run_blocks(bench, journal, blocks)
    outcomes = Results.read(journal).outcomes
    assert outcomes["dear"].startswith("dropped: 1000 s needed")
    assert outcomes["cheap"] == "done"


def test_a_worker_whose_device_is_gone_asks_for_another(
    bench: Bench, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        raise BrokenDeviceError("an illegal address")

    monkeypatch.setitem(sys.modules, "report_test_blocks", SimpleNamespace(run=lambda _: None))
    monkeypatch.setattr(bench, "check_device", gone)
    blocks = [Block(name, 1, "report_test_blocks:run") for name in ("first", "second")]
    assert worker.run_blocks(bench, journal, blocks) == worker.BROKEN_DEVICE
    assert list(Results.read(journal).outcomes) == ["first"]


# --- timing on a card, whose parts are played here ---


class FakeCuda:
    """Events that read a clock, which each call moves on; graphs that repeat what was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0.0
        self.ms_per_event = 0.0
        self.num_calls = 0
        self.capture: list[Any] | None = None
        for name in ("synchronize", "current_stream", "stream", "graph", "Event", "CUDAGraph", "Stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def work(self) -> None:
        """What is timed: 10 µs, or nothing while it is recorded."""
        if self.capture is None:
            self.now_ms += 0.01
            self.num_calls += 1
        else:
            self.capture.append(self.work)

    def tick(self) -> float:
        self.now_ms += self.ms_per_event
        return self.now_ms

    def synchronize(self) -> None:
        pass

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda _: None)

    def Stream(self) -> Any:
        return self.current_stream()

    def stream(self, _: Any) -> Any:
        return SimpleNamespaceContext()

    def Event(self, *, enable_timing: bool) -> Any:
        event = SimpleNamespace(at_ms=0.0)
        event.record = lambda: setattr(event, "at_ms", self.tick())
        event.elapsed_time = lambda other: other.at_ms - event.at_ms
        assert enable_timing
        return event

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(calls=[], replay=lambda: None, reset=lambda: None)

    def graph(self, graph: Any) -> Any:
        return Capture(self, graph)


class SimpleNamespaceContext:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Capture:
    def __init__(self, cuda: FakeCuda, graph: Any) -> None:
        self.cuda, self.graph = cuda, graph

    def __enter__(self) -> None:
        self.cuda.capture = []

    def __exit__(self, *_: object) -> None:
        calls, self.cuda.capture = self.cuda.capture or [], None
        self.graph.replay = lambda: [call() for call in calls]


@pytest.fixture
def card(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    bench.is_smoke, bench.device = False, torch.device("cuda")
    return FakeCuda(monkeypatch)


@pytest.mark.parametrize("is_captured", [True, False])
def test_a_call_is_timed_by_replays_over_all_copies(bench: Bench, card: FakeCuda, is_captured: bool) -> None:
    found = timing.time_calls(bench, [card.work] * 4, is_headline=True, is_captured=is_captured)
    assert found.median_s == pytest.approx(10e-6)
    assert found.spread == pytest.approx(0.0, abs=1e-6)
    # Two measurements of 30 samples; 25 rounds of 4 calls are the millisecond that a sample takes at least.
    assert card.num_calls >= 2 * 30 * 100


def test_copies_are_as_many_as_leave_the_cache(bench: Bench, card: FakeCuda) -> None:
    assert timing.num_copies(bench, 2 << 30) == 1
    assert timing.num_copies(bench, 32 << 20) == 8
    assert timing.num_copies(bench, 1) == timing.MAX_COPIES


class PlayedDevice(str):
    """The CPU to those who make tensors on it, a GPU to those who ask for its type."""

    type = "cuda"


def test_what_only_a_card_does_runs_on_a_played_one(
    bench: Bench, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")
    from report import ceilings
    from report.kernels import elementwise

    FakeCuda(monkeypatch).ms_per_event = 1.0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(ceilings, "NUM_EMPTY", 10)
    bench.device = PlayedDevice("cpu")  # type: ignore[assignment]
    ceilings.run(bench)
    elementwise.run(bench)
    rows = {row.name: row for _, row in Results.read(journal).rows}
    assert {name for name, row in rows.items() if row.measured is None} == {
        "round trip us",  # memory is pinned by a real card only
        "empty kernel, dependent launch, us",
        *unmeasured_on_this_processor(),
    }
    # A millisecond passes between the events; ten kernels, or the bytes of a copy, lie between them.
    assert rows["empty kernel us"].measured == pytest.approx(100.0)
    assert rows["copy GB/s"].measured == pytest.approx(2 * 4096 * 2 / 1e-3 / 1e9)


@pytest.mark.full
def test_kernels_that_measure_ceilings_compile_for_a_card() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")
    script = """
import torch
from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.ahead_of_time.compile import compile_case
from llmstack_kernels.ahead_of_time.target import TARGETS
from report.ceiling_kernels import read_sums, start_empty, write_all
x = torch.empty(1 << 30, dtype=torch.bfloat16, device="meta")
out = torch.empty(1, dtype=torch.int32, device="meta")
calls = {
    "read": lambda: read_sums(x, 132 * 8, 4096, 8),
    "write": lambda: write_all(x, 0.5),
    "plain": lambda: start_empty(out, is_chained=False),
    "chained": lambda: start_empty(out, is_chained=True),
}
for name, call in calls.items():
    (compiled,) = compile_case("report", CompileCase(name, call), TARGETS[90])
    print(name, compiled.binary.asm["ptx"].count("griddepcontrol"))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.splitlines() == ["read 0", "write 0", "plain 0", "chained 2"], done.stderr


def test_pauses_of_the_device_are_distinguished() -> None:
    from report.engine.device_time import account

    found = account([(0, 10), (12, 20), (15, 30), (130, 140)])
    assert (found.busy_us, found.gaps_us, found.idle_us) == (38, 2, 100)
    assert found.idle_share == pytest.approx(100 / 140)
    assert account([]).idle_share == 0.0


# --- the whole of it, on tiny shapes ---

# What our packages would use and a machine with torch, Triton and transformers need not have.
ABSENT = ("zmq", "llguidance", "fastapi", "uvicorn", "pydantic_settings", "prometheus_client", "starlette")


def smoke(tmp_path: Path, part: str, *blocks: str) -> dict[str, Any]:
    """Runs the script as a stranger would, without what a bare machine lacks; returns its figures."""
    finder = f"import sys\nfor name in {ABSENT!r}:\n    sys.modules[name] = None\n"
    (tmp_path / "sitecustomize.py").write_text(finder, encoding="utf-8")
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "gpu_report.py"), "--smoke", "--part", part, "--json", str(out)]
    command += [argument for block in blocks for argument in ("--only", block)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "No figure below means anything" in done.stdout
    last = done.stdout.rstrip().splitlines()[-1]
    assert last.startswith([planned.name for planned in PLAN if planned.part == part][-1])
    figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert set(figures["outcomes"].values()) == {"done"}, done.stdout
    failed = {row["name"] for row in figures["rows"] if "failed" in row["note"]}
    assert failed <= unmeasured_on_this_processor()
    return figures


QUICK = {"kernels": ("linears", "prefill attention"), "engine": ("8B decode",)}


@pytest.mark.parametrize("part", QUICK)
def test_the_most_important_blocks_run_on_a_cpu(tmp_path: Path, part: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")
    if part == "engine":
        pytest.importorskip("llmstack_model_runner", reason="the package stands alone, without the engine")
    figures = smoke(tmp_path, part, *QUICK[part])
    assert set(figures["outcomes"]) == {"ceilings", *QUICK[part]}
    assert figures["ceilings"]["read GB/s"] > 0


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", QUICK)
def test_every_block_runs_on_a_cpu_and_every_planned_row_comes(tmp_path: Path, part: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")
    if part == "engine":
        pytest.importorskip("llmstack_model_runner", reason="the package stands alone, without the engine")
        pytest.importorskip("transformers", reason="transformers is not installed")
    figures = smoke(tmp_path, part)
    names = {row["name"] for row in figures["rows"]}
    assert {planned.name for planned in PLAN if planned.part == part} <= names


def test_without_a_gpu_it_says_so_in_a_sentence_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_report.main([]) == 2
    complaint = capsys.readouterr().err
    assert complaint.strip().count("\n") == 0
    assert "needs an NVIDIA GPU" in complaint


def test_an_unknown_block_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_report.main(["--only", "nothing"])
    assert "nothing is no block of --part kernels" in capsys.readouterr().err
