"""The pages on the server's flags and on HTTP: what they say holds, and what they show runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
TOOL = Path(__file__).resolve().parents[1] / "tools" / "make_flags_page.py"


def test_the_page_on_flags_is_current() -> None:
    result = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, f"run: python tools/make_flags_page.py\n{result.stdout}{result.stderr}"


def test_middleware_and_routes_of_ones_own_run_as_the_page_shows(serve: Callable[..., Any], tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", (DOCS / "http.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    flags = ("--middleware", "mine:mark", "--extra-routes", "mine:add_routes")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    with serve(*flags, env={"PYTHONPATH": os.pathsep.join(paths)}) as server:
        status, answer, headers = server.post("/story", {"hero": "cat"})
        assert (status, headers["x-marked"]) == (200, "yes")
        assert answer["usage"]["completion_tokens"] > 0
