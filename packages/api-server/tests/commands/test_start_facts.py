"""What the doctor asks the server."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from llmstack_server.commands.start_facts import start_facts
from llmstack_server.commands.subcommands import ServeCommand


def facts(*words: str) -> dict[str, tuple[str, str]]:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    return {name: (state, text) for name, state, text in start_facts(parser.parse_args(words)) if state != "note"}


def test_a_start_that_would_succeed_has_no_problems(tmp_path: Path):
    found = facts("--port", "0", "--state-dir", str(tmp_path / "new"))
    assert {name: state for name, (state, _) in found.items()} == {"start": "ok", "port": "ok", "state folder": "ok"}
    assert not (tmp_path / "new").exists()


def test_a_model_that_is_not_there_is_a_problem():
    assert facts("/nowhere", "--port", "0")["start"] == ("problem", "There is no folder /nowhere.")


def test_a_port_in_use_is_a_problem_and_is_not_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        state, text = facts("--port", str(port))["port"]
    assert (state, text.partition(";")[0]) == ("problem", f"port {port} on 127.0.0.1 is in use by another program")
    assert facts("--port", str(port))["port"][0] == "ok"


def test_a_folder_that_is_open_to_others_is_a_problem(tmp_path: Path):
    tmp_path.chmod(0o755)
    state, text = facts("--port", "0", "--state-dir", str(tmp_path))["state folder"]
    assert state == "problem"
    assert text.endswith("its permissions must be 700")


def test_a_unix_socket_needs_no_port(tmp_path: Path):
    path = tmp_path / "server.sock"
    assert "unix socket" in facts("--uds", str(path))["port"][1]
    assert not path.exists()
