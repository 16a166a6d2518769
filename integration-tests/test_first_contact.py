"""`tools/first_contact.py`, with a small repository in place of this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

SERVER = """
import http.server, os, subprocess, sys

BURN = "import time\\nwhile time.process_time() < 0.5: pass"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for text in ("", "Paris", "."):
            self.wfile.write(b'data: {"choices": [{"delta": {"content": "%s"}}]}\\n\\n' % text.encode())


subprocess.run([sys.executable, "-c", BURN], check=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("home", os.environ["HOME"], "secret", os.environ.get("SECRET_OF_MINE"), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def repository(folder: Path, makefile: str) -> Path:
    folder.mkdir()
    (folder / "server.py").write_text(SERVER)
    (folder / "Makefile").write_text(makefile)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com", "-C", str(folder)]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    return folder


def first_contact(folder: Path, workspace: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/first_contact.py"), "--repository", str(folder), *words]
    variables = {**os.environ, "TMPDIR": str(workspace), "SECRET_OF_MINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=variables)


def test_the_first_token_is_timed_with_the_processor_time_of_what_ended(tmp_path: Path):
    makefile = f"serve: ; @exec {sys.executable} server.py $(ARGS)\nsetup: ; @true\ntest: ; @echo all pass\n"
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    done = first_contact(repository(tmp_path / "repository", makefile), workspace, "--test")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(re.findall(r"^(first token.*?|set-up.*?|`make test`): (.*)$", done.stdout, re.MULTILINE))
    assert list(rows) == ["first token", "first token of a second `make serve`", "set-up of `make test`", "`make test`"]
    assert rows["first token"].endswith("the first token is 'Paris'")
    for name in list(rows)[:2]:
        spent = re.search(r"([\d.]+) s of processor time", rows[name])
        assert spent is not None
        assert 0.5 <= float(spent[1]) < 20  # half a second of a child that has ended, and nothing of the stage before
    assert "all pass" in done.stdout
    assert '"POST /v1/chat/completions HTTP/1.1" 200' in done.stdout  # the access log, without questions of the tool
    assert "/health" not in done.stdout
    assert re.search(rf"home {workspace}/first-contact-\w+/home secret None", done.stdout)
    assert list(workspace.iterdir()) == []


def test_all_that_it_started_has_ended(tmp_path: Path):
    makefile = f"serve: ; @exec {sys.executable} server.py $(ARGS)\n"
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    assert first_contact(repository(tmp_path / "repository", makefile), workspace).returncode == 0
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if str(workspace) in _text(path)]
    assert left == []


@pytest.mark.parametrize("makefile", ["serve: ; @false\n", "test: ; @true\n"])
def test_a_start_that_fails_says_so(tmp_path: Path, makefile: str):
    done = first_contact(repository(tmp_path / "repository", makefile), tmp_path)
    assert done.returncode == 1
    assert "ended with exit code 2 before it served" in done.stdout


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it ended meanwhile, or is another user's
        return ""
