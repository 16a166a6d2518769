"""A sweep starts a server with each set of flags and measures each with each load."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from llmstack_bench.errors import BenchError
from llmstack_bench.sweep import read_params, with_flags
from llmstack_bench.testing import FakeServer
from llmstack_command.main import main

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
BENCH = """
import json, sys
def of(flag): return sys.argv[sys.argv.index(flag) + 1]
with open(of("--result-dir") + "/" + of("--result-filename"), "w") as file:
    json.dump({"rate": float(of("--request-rate")), "seed": int(of("--seed")), "label": "x"}, file)
"""


def line(script: str, *flags: str) -> str:
    return shlex.join([sys.executable, "-c", script, *flags])


def written(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("command", "params", "expected"),
    [
        ("a m --x 1 --y 2", {"x": 3}, "a m --y 2 --x 3"),
        ("a --x=1 --y", {"x": 2, "y": False}, "a --x 2 --no-y"),
        ("a --no-y --b_c 1", {"y": True, "b_c": None}, "a --y"),
        ("a --x 1", {"_benchmark_name": "n"}, "a --x 1"),
        ("a", {"x": {"k": [1]}}, """a --x '{"k": [1]}'"""),
    ],
)
def test_flags_replace_those_of_the_command(command: str, params: dict[str, Any], expected: str) -> None:
    assert shlex.join(with_flags(shlex.split(command), params)) == expected


def test_every_server_meets_every_load_and_a_summary_has_all_numbers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [
        "bench", "sweep", "serve", "--serve-cmd", line(SERVER), "--bench-cmd", line(BENCH, "--request-rate", "1"),
        "--serve-params", written(tmp_path / "s.json", {"small": {"max_num_seqs": 2}}), "--num-runs", "2",
        "--bench-params", written(tmp_path / "b.json", [{"request_rate": 5}, {"request_rate": 7}]), "-o", str(out),
    ]  # fmt: skip
    assert main(arguments) == 0
    assert sorted(str(path.relative_to(out)) for path in out.rglob("run=*.json")) == [
        f"serve--small/bench--request_rate={rate}/run={run}.json" for rate in (5, 7) for run in (0, 1)
    ]
    rows = json.loads((out / "summary.json").read_text())
    assert [(row["rate"], row["run"], row["seed"], row["serve.max_num_seqs"]) for row in rows] == [
        (5, 0, 0, 2), (5, 1, 1, 2), (7, 0, 0, 2), (7, 1, 1, 2),
    ]  # fmt: skip
    with (out / "summary.csv").open() as file:
        assert [row["bench.request_rate"] for row in csv.DictReader(file)] == ["5", "5", "7", "7"]
    arguments[4] = line("raise SystemExit('not started again')")
    assert main([*arguments, "--resume"]) == 0


def test_a_dry_run_prints_the_commands_and_starts_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "sweep", "--serve-cmd", "absent serve m --port 9", "--bench-cmd", "absent bench", "--dry-run"]
    assert main([*arguments, "--num-runs", "1", "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "absent serve m --port 9"
    assert printed[1].startswith("  absent bench --host 127.0.0.1 --port 9 --seed 0 --save-result --result-dir ")
    assert not (tmp_path / "out").exists()


def test_what_goes_wrong_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = ["bench", "sweep", "--serve-cmd", line(SERVER), "--bench-cmd", line("raise SystemExit(3)"), "-o"]
    assert main([*failing, str(tmp_path)]) == 1
    assert "--bench-cmd: ended with 3" in capsys.readouterr().err
    with FakeServer() as server:
        port = server.url.rpartition(":")[2]
        taken = ["bench", "sweep", "--serve-cmd", f"absent --port {port}", "--bench-cmd", "x", "-o", str(tmp_path)]
        assert main(taken) == 2
    assert "already in use" in capsys.readouterr().err
    for content in ([], [1], "x", {"a": 1}):
        with pytest.raises(BenchError, match="--serve-params"):
            read_params("--serve-params", Path(written(tmp_path / "p.json", content)))


def test_linked_pairs_are_measured_alone_after_a_warm_up_and_failures_are_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks = tmp_path / "marks"
    fails_for_7 = BENCH + "\nif of('--request-rate') == '7' and '--num-prompts' not in sys.argv: sys.exit(3)"
    arguments = [
        "bench", "sweep", "serve", "--serve-cmd", line(SERVER), "--bench-cmd", line(fails_for_7, "--request-rate", "1"),
        "--serve-params", written(tmp_path / "s.json", [{"rate": 5}, {"rate": 7}]), "--num-runs", "1", "--show-stdout",
        "--bench-params", written(tmp_path / "b.json", [{"request_rate": 5}, {"request_rate": 7}, {"request_rate": 9}]),
        "--link-vars", "rate=request_rate", "-o", str(tmp_path), "-e", "name", "--warmup-num-prompts", "3",
        "--after-bench-cmd", line(f"open({str(marks)!r}, 'a').write('x')"), "--server-ready-timeout", "60",
    ]  # fmt: skip
    assert main([*arguments, "--continue-on-error"]) == 1
    assert "--bench-cmd: ended with 3" in capsys.readouterr().err
    rows = json.loads((tmp_path / "name" / "summary.json").read_text())
    assert [(row["rate"], row["serve.rate"]) for row in rows] == [(5, 5)]
    assert sorted(path.name for path in (tmp_path / "name").rglob("run=*.json")) == [
        "run=0.failed.json", "run=0.json", "run=1000000.json", "run=1000000.json",
    ]  # fmt: skip
    assert marks.read_text() == "x"
    assert main([*arguments, "--link-vars", "rate=absent"]) == 2
    assert main(["bench", "sweep", "serve_workload", *arguments[3:]]) == 2
    assert "sweep serve" in capsys.readouterr().err
