"""Files and batches with the official client, as the page shows them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs/batches.md"


@pytest.mark.full
def test_the_example_of_the_page_runs(serve: Callable[..., Any], tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    with serve("--state-dir", str(tmp_path / "state")) as server:
        script = tmp_path / "example.py"
        script.write_text(code.replace("http://127.0.0.1:8000", server.url), encoding="utf-8")
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("completed BatchRequestCounts(completed=3, failed=0, total=3)")
    assert sorted(line.split()[0] for line in done.stdout.splitlines() if line.startswith("story-")) == [
        "story-0", "story-1", "story-2",
    ]  # fmt: skip
