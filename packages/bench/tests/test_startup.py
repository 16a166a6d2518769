"""Starts, process trees and the memory's speed."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmstack_bench.bandwidth import read_bandwidth_gb_per_s
from llmstack_bench.commands.startup import StartupBench
from llmstack_bench.errors import BenchError
from llmstack_bench.process_tree import TreeMemory, stop_group, tree_cpu_s, tree_memory, tree_pids
from llmstack_bench.startup import Start, command_with_port, measure_start, measure_starts, start_values
from llmstack_command.main import main

SERVER = """
import signal, sys, threading
from http.server import ThreadingHTTPServer
from llmstack_bench import testing

port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(testing._Handler):
    behaviour, bodies = testing.Behaviour(status=STATUS), []
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
"""


def options(*command: str, **changes: float) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    StartupBench().add_arguments(parser)
    named = parser.parse_args([])
    return argparse.Namespace(**{**vars(named), "server_command": list(command), "num_iters": 1, **changes})


def fake_server(folder: Path, status: int = 200) -> list[str]:
    script = folder / "server.py"
    script.write_text(SERVER.replace("STATUS", str(status)))
    return [sys.executable, str(script)]


def test_a_start_is_timed_from_process_to_first_token(tmp_path: Path):
    start = measure_start(options(*fake_server(tmp_path)))
    assert 0 < start.socket_s <= start.ready_s <= start.first_token_s
    assert start.memory.num_processes == 1
    assert 0 < start.memory.pss <= start.memory.rss <= start.memory.peak_rss


def test_the_command_starts_several_times_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "r.json"
    line = ["bench", "startup", "--num-iters", "2", "--output-json", str(path), "--", *fake_server(tmp_path)]
    assert main(line) == 0
    assert "median first token (s)" in capsys.readouterr().out
    assert "median_ready_s" in path.read_text()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-command-here", "No such file"),
        (f"{sys.executable} -c \"print('my last words')\"", "ended with 0 before its port is open: my last words"),
    ],
)
def test_a_command_that_starts_no_server_is_an_error_with_its_last_output(command: str, reason: str):
    with pytest.raises(BenchError, match=reason):
        measure_starts(options(*shlex.split(command)))


def test_a_server_that_never_gets_ready_is_an_error_and_is_ended():
    with pytest.raises(BenchError, match="waiting until its port is open"):
        measure_start(options(sys.executable, "-c", "import time; time.sleep(60)", timeout=0.2))


def test_a_ready_server_that_refuses_is_an_error(tmp_path: Path):
    with pytest.raises(BenchError, match="HTTP 500"):
        measure_start(options(*fake_server(tmp_path, 500)))


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "startup"]) == 2
    assert "after --" in capsys.readouterr().err


def test_a_port_is_taken_from_the_command_or_put_into_it():
    assert command_with_port(["s", "--port", "81"]) == (["s", "--port", "81"], 81)
    assert command_with_port(["s", "--port=82"]) == (["s", "--port=82"], 82)
    words, port = command_with_port(["s", "--port", "{port}", "-b", "127.0.0.1:{port}"])
    assert words == ["s", "--port", str(port), "-b", f"127.0.0.1:{port}"]
    words, port = command_with_port(["s"])
    assert words == ["s", "--port", str(port)]


@pytest.mark.parametrize("port", ["0", "x", ""])
def test_a_port_that_says_nothing_is_an_error(port: str):
    with pytest.raises(BenchError, match="--port"):
        command_with_port(["s", "--port", port])


def test_the_first_start_stands_apart_from_the_median():
    memory = TreeMemory(2, 10.0, 12.0, 8.0)
    starts = [Start(seconds, seconds * 2, seconds * 3, 0.1, memory) for seconds in (9.0, 1.0, 2.0)]
    values = start_values(starts)
    assert (values["median_ready_s"], values["first_ready_s"]) == (4.0, 18.0)
    assert values["median_peak_rss_mib"] == 12.0
    assert values["median_num_processes"] == 2


def test_a_tree_holds_descendants_and_their_memory():
    child = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    script = f"import subprocess, sys, time; subprocess.Popen({child}); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while len(tree_pids(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(tree_pids(process.pid)) == 2
        assert tree_memory(process.pid).num_processes == 2
        own = tree_memory(process.pid)
        assert own.rss > 5
    finally:
        pids = tree_pids(process.pid)
        assert stop_group(process, 10)
    assert process.returncode == -signal.SIGTERM
    deadline = time.monotonic() + 20  # the child ends after its parent, which is waited for
    while any(tree_memory(pid).num_processes for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_processor_time_of_a_tree_is_that_of_all_its_processes(tmp_path: Path):
    ticks = {5: (300, 40), 6: (7, 0), 8: (900, 900)}
    for pid, parent in ((5, 1), (6, 5), (8, 1)):
        (tmp_path / str(pid)).mkdir()
        user, kernel = ticks[pid]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a b) S {parent} 1 1 0 -1 0 0 0 0 0 {user} {kernel} 0 0")
    assert tree_cpu_s(5, tmp_path) == pytest.approx((300 + 40 + 7) / os.sysconf("SC_CLK_TCK"))
    assert tree_cpu_s(99, tmp_path) == 0.0


def test_a_process_that_heeds_no_signal_is_killed():
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert not stop_group(process, 0.05)
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()


def test_a_tree_is_read_whatever_the_names_of_its_processes(tmp_path: Path):
    for pid, parent, name in ((1, 0, "init"), (5, 1, "a) (b"), (6, 5, "c"), (7, 1, "d")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 0 0")
    (tmp_path / "self").mkdir()
    (tmp_path / "6" / "status").write_text("Name:\tc\nVmHWM:\t 4096 kB\nVmRSS:\t 2048 kB\n")
    (tmp_path / "6" / "smaps_rollup").write_text("00-ff ---p [rollup]\nPss:\t 1024 kB\n")
    assert tree_pids(5, tmp_path) == [5, 6]
    assert tree_pids(99, tmp_path) == []
    assert tree_memory(5, tmp_path) == TreeMemory(1, 2.0, 4.0, 1.0)


def test_memory_is_read_at_some_speed():
    assert read_bandwidth_gb_per_s(2, 8 << 20) > 0
