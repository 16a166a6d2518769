"""What is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmstack_command.collect_env import software
from llmstack_command.collect_env.software import import_facts, package_versions, python_facts


def probe(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_interpreter_is_named():
    assert python_facts()["executable"] == sys.executable


def test_packages_that_matter_are_named_once():
    assert package_versions().items() >= {"pip": package_versions()["pip"]}.items()
    assert "pytest" not in package_versions()


def test_the_facts_of_the_probe_are_included():
    assert import_facts(probe('print(\'{"torch": "2.13", "threads": 2}\')')) == {"torch": "2.13", "threads": "2"}


@pytest.mark.parametrize(
    ("program", "words"),
    [("raise ImportError('libtorch is broken')", "libtorch is broken"), ("import os; os._exit(3)", "exit code 3")],
)
def test_a_probe_that_fails_says_why(program: str, words: str):
    assert words in import_facts(probe(program))["torch"]


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(software, "PROBE_TIMEOUT_S", 0.1)
    hanging = probe("import time; time.sleep(600)")
    assert "within" in import_facts(hanging)["torch"]
    assert hanging.poll() is not None


def test_without_torch_nothing_is_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert import_facts(software.start_probe()) == {"torch": "not installed"}
