"""The whole report, its layout and its exit code."""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from llmstack_command.doctor import reach, software
from llmstack_command.doctor.finding import Finding
from llmstack_command.doctor.report import render
from llmstack_command.main import main


class Answer:
    """What stands in for the settings of the hub's library."""

    HF_HUB_OFFLINE = False

    def __init__(self, endpoint: str) -> None:
        self.ENDPOINT = endpoint


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(ImportError):
        monkeypatch.setattr(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)}


def test_a_line_has_its_mark_and_its_remedy_below():
    text = render([Finding("a", "ok", "fine"), Finding("long", "problem", "broken", "mend it")])
    assert text == (
        "ok    a     fine\nFAIL  long  broken\n            -> mend it\n\n1 thing prevents `llmstack serve`."
    )
    assert render([Finding("a", "note", "odd")]).endswith("`llmstack serve` can start.")


def test_a_port_in_use_prevents_serving_and_the_server_says_what_to_do(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("llmstack_server")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["doctor", "--port", str(port), "--json"]) == 1
    found = findings(capsys)["port"]
    assert found["state"] == "problem"
    assert found["text"] == f"port {port} on 127.0.0.1 is in use by another program"
    assert found["remedy"] == "choose another one with --port"


def test_a_machine_that_can_serve_ends_with_zero(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    pytest.importorskip("llmstack_server")
    folder = tmp_path / "state"
    assert main(["doctor", "--port", "0", "--state-dir", str(folder), "--json"]) == 0
    found = findings(capsys)
    assert found["state folder"]["text"] == f"{folder}, which the start creates"
    assert not folder.exists()
    assert list(found) == [
        "system", "processor", "caches", "memory", "GPU", "packages", "torch", "native kernels", "bytecode",
        "Ray", "model", "start", "port", "state folder", "hub",
    ]  # fmt: skip
    assert all(each["remedy"] for each in found.values() if each["state"] == "note" and each["name"] != "start")


def test_wrong_words_are_findings(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("llmstack_server")
    assert main(["doctor", "/nowhere", "--port", "http", "--json"]) == 1
    assert findings(capsys)["start"]["state"] == "problem"


def test_it_imports_no_torch_where_there_is_no_gpu():
    pytest.importorskip("llmstack_server")
    code = (
        "import sys; from llmstack_command.doctor import machine; machine.gpu_facts = lambda: {'nvidia-smi': 'none'}\n"
        "from llmstack_command.main import main; main(['doctor', '--port', '0']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def hub(endpoint: str, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 5.0) -> Finding:
    monkeypatch.setattr(reach, "package_module", lambda name: Answer(endpoint))
    (finding,) = reach.Hub(timeout_s).findings()
    return finding


class _Redirecting(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(401)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        return


def test_a_hub_that_answers_anything_is_reachable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), _Redirecting) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        found = hub(f"http://127.0.0.1:{server.server_port}", monkeypatch)
        thread.join()
    assert found.state == "ok"


def test_a_hub_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        found = hub(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch, timeout_s=0.2)
    assert found.state == "note"
    assert "cannot be reached" in found.text


def test_a_missing_requirement_prevents_serving(monkeypatch: pytest.MonkeyPatch):
    class Installed:
        name, version, metadata = "llmstack-server", "1", {"Name": "llmstack-server"}
        requires = ("of-nobody>=1", "optional-of-nobody ; extra == 'x'")

    monkeypatch.setattr(software, "distributions", lambda: [Installed()])
    (found,) = software.packages()
    assert (found.state, found.remedy) == ("problem", "pip install of-nobody")


def test_the_command_alone_says_what_serves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(software, "distributions", list)
    (found,) = software.packages()
    assert (found.state, found.remedy) == ("problem", "pip install llmstack-server")


@pytest.mark.parametrize(
    ("built", "stale", "state", "words"),
    [
        (["avx512", "avx2"], [], "ok", "avx512, compiled from the present sources"),
        (["avx2"], [], "note", "this processor runs avx512, which is faster"),
        (["avx2"], ["avx2"], "problem", "avx2, older than their sources"),
        ([], [], "note", "not compiled for this processor (avx512)"),
    ],
)
def test_the_kernels_are_those_that_a_start_would_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: list[str], stale: list[str], state: str, words: str
):
    class Builder:
        @staticmethod
        def runnable_variants() -> list[str]:
            return ["avx512", "avx2"]

        @staticmethod
        def library_path(name: str) -> Path:
            return tmp_path / name

        @staticmethod
        def is_stale(name: str) -> bool:
            return name in stale

        @staticmethod
        def tiles_refusal() -> str:
            return refusal

    refusal = ""
    for name in built:
        (tmp_path / name).write_text("")
    monkeypatch.setattr(software, "module_of_file", lambda package, file: Builder)
    (found,) = software.native_kernels()
    assert found.state == state
    assert words in found.text
    assert bool(found.remedy) == (state != "ok")
    refusal = "Operation not permitted"
    again, note = software.native_kernels()
    assert (again, note.state) == (found, "note")
    assert refusal in note.text
