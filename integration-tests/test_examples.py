"""The README's examples are run as they stand, against the server it tells its reader to start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def run(arguments: list[str], folder: Path) -> str:
    result = subprocess.run(
        arguments, capture_output=True, text=True, timeout=120, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "2"}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.strip().splitlines()[0][:50])
def test_python_examples_run(code: str, demo_server: Any, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code.replace("http://127.0.0.1:8000", demo_server.url))
    assert run([sys.executable, str(script)], tmp_path).strip()


@pytest.mark.parametrize("code", [b for b in blocks("bash") if b.startswith("curl")])
def test_curl_examples_answer(code: str, demo_server: Any, tmp_path: Path) -> None:
    answer = run(["bash", "-c", code.replace("http://127.0.0.1:8000", demo_server.url)], tmp_path)
    assert '"error"' not in answer
    assert any(field in answer for field in ('"choices"', '"embedding"', '"results"'))
