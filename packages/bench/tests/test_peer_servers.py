"""The comparison with peers' servers: what it started ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from llmstack_bench.process_tree import TreeMemory, tree_memory

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "peers" / "servers.py"
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
# All but the servers and the load are the script's.
DRIVER = """
import importlib.util, os, signal, sys, time

spec = importlib.util.spec_from_file_location("servers", sys.argv[1])
servers = sys.modules["servers"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(servers)

def suspend(running, *_):
    os.kill(running[0].pid, signal.SIGSTOP)
    print("pids", *(one.pid for one in running), flush=True)
    time.sleep(60)

command = [sys.executable, sys.argv[2]]
servers.peer_command = servers.own_command = lambda *_: command
servers.measure = suspend
sys.argv = ["servers.py", "models", "--openvino", "python", "--only", "GPT-2's shape: one stream"]
servers.main()
"""


def test_servers_end_with_the_script_also_suspended_ones(tmp_path: Path):
    for name, text in (("server.py", SERVER), ("driver.py", DRIVER)):
        (tmp_path / name).write_text(text)
    command = [sys.executable, str(tmp_path / "driver.py"), str(SCRIPT), str(tmp_path / "server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        line = next(line for line in script.stdout if line.startswith("pids"))
        pids = [int(word) for word in line.split()[1:]]
        assert [tree_memory(pid).num_processes for pid in pids] == [1, 1]
        asked_s = time.monotonic()
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 128 + signal.SIGTERM
    assert time.monotonic() - asked_s < 15  # and not the 20 s after which a server is killed
    assert [tree_memory(pid) for pid in pids] == [TreeMemory(0, 0.0, 0.0, 0.0)] * 2
