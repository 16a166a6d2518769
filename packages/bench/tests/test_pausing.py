"""Servers that stand still in the turns of the others."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmstack_bench.errors import BenchError
from llmstack_bench.pausing import PausedTrees
from llmstack_bench.process_tree import tree_pids
from llmstack_command.main import main

SLEEP = "import time; time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{SLEEP}'])"
# Writes the states of both servers' processes beside every request it answers.
SERVER = """
import sys
from pathlib import Path
from http.server import ThreadingHTTPServer
from llmstack_bench import testing

log = Path(sys.argv[1])
class Handler(testing._Handler):
    behaviour, bodies = testing.Behaviour(), []
    def do_POST(self):
        pids = [int(path.name) for path in log.parent.glob("*[0-9]")]
        states = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}
        with log.open("a") as file:
            file.write("".join(sorted(states.values())) + "\\n")
        super().do_POST()
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        for pid in tree_pids(process.pid):
            with contextlib.suppress(ProcessLookupError):
                subprocess.run(["kill", "-KILL", str(pid)], check=False)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def states(pid: int) -> list[str]:
    stats = [Path(f"/proc/{member}/stat").read_text() for member in tree_pids(pid)]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def reaches(pid: int, *, is_stopped: bool, num_processes: int = 2) -> bool:
    """Whether the whole tree stops, or sleeps, within a while: a signal takes effect a moment after it was sent.

    A parent that waits for `exec` of its child (D) must not be stopped yet: its child would never get there.
    """
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = states(pid)
        if len(found) == num_processes and all(state == ("T" if is_stopped else "S") for state in found):
            return True
        time.sleep(0.01)
    return False


def test_trees_stand_still_except_in_their_turn_and_run_afterwards():
    with running(PARENT) as one, running(PARENT) as other:
        assert reaches(one.pid, is_stopped=False)
        assert reaches(other.pid, is_stopped=False)
        with PausedTrees([one.pid, other.pid]) as paused:
            assert reaches(one.pid, is_stopped=True)
            with paused.running(one.pid):
                assert reaches(one.pid, is_stopped=False)
                assert reaches(other.pid, is_stopped=True)
            assert reaches(one.pid, is_stopped=True)
        assert reaches(one.pid, is_stopped=False)
        assert reaches(other.pid, is_stopped=False)


def test_a_process_that_is_not_there_is_an_error_and_the_others_run_on():
    with running(SLEEP) as one, running("pass") as ended:
        ended.wait()
        with pytest.raises(BenchError, match=f"--server-pid {ended.pid}: there is no such process"):
            PausedTrees([one.pid, ended.pid]).__enter__()
        assert reaches(one.pid, is_stopped=False, num_processes=1)


def test_a_turn_whose_process_ends_leaves_the_others_to_run_on():
    with running(SLEEP) as one, running(SLEEP) as mortal:
        with PausedTrees([one.pid, mortal.pid]) as paused, paused.running(mortal.pid):
            mortal.kill()
            mortal.wait()
        assert reaches(one.pid, is_stopped=False, num_processes=1)


def test_every_request_of_a_comparison_meets_a_server_that_runs_alone(tmp_path: Path):
    log, result = tmp_path / "log", tmp_path / "r.json"
    with running(SERVER, str(log)) as one, running(SERVER, str(log)) as other:
        servers = []
        for label, process in (("one", one), ("other", other)):
            (tmp_path / str(process.pid)).touch()
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            servers += ["--base-url", url, "--label", label, "--server-pid", str(process.pid)]
        line = ["bench", "serve", "--num-prompts", "3", "--random-output-len", "2", "--repetitions", "2"]
        assert main([*line, *servers, "--disable-tqdm", "--output-json", str(result)]) == 0
        assert reaches(one.pid, is_stopped=False, num_processes=1)
    # One warm-up and two runs of three requests each; the other of the two stands still.
    found = log.read_text().split()
    assert len(found) == 2 * (1 + 2 * 3)
    assert all(sorted(states).count("T") == 1 for states in found)
    runs = [run for server in json.loads(result.read_text())["servers"] for run in server["runs"]]
    assert all(run["failed"] == 0 and run["server_cpu_s"] >= 0 for run in runs)


def test_each_server_needs_its_process(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "serve", "--base-url", "http://a", "--base-url", "http://b", "--server-pid", "1"]) == 2
    assert "--server-pid: give one for each --base-url" in capsys.readouterr().err
