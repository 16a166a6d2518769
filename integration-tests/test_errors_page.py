"""The table of errors: the page is written from it, and it has exactly the codes that the packages raise."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from llmstack_server.web.error_table import ERRORS

ROOT = Path(__file__).resolve().parents[1]
RAISING = ("api-server", "llm", "media", "structured-output", "engine-core", "core-scheduler")


def string_constants() -> set[str]:
    """All strings in the sources of the packages that raise errors of requests, the table's own aside."""
    texts: set[str] = set()
    for name in RAISING:
        for path in ROOT.glob(f"packages/{name}/src/**/*.py"):
            if path.name != "error_table.py":
                nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                texts |= {
                    node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
                }
    return texts


def raised_codes() -> set[str]:
    """Codes given by keyword, `code="..."`; of an f-string, every code that ends like it."""
    codes: set[str] = set()
    for name in RAISING:
        for path in ROOT.glob(f"packages/{name}/src/**/*.py"):
            for prefix, text in re.findall(r"\bcode=(f?)\"([^\"]+)\"", path.read_text(encoding="utf-8")):
                ending = text.rpartition("}")[2]
                codes |= {f"{kind}{ending}" for kind in ("integer", "decimal")} if prefix else {text}
    return codes


def test_the_page_is_written_from_the_table() -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_errors_page.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_code_that_is_raised_is_in_the_table() -> None:
    codes = raised_codes()
    assert {"integer_above_max_value", "context_length_exceeded", "invalid_value"} <= codes
    assert codes - set(ERRORS) == set()


def test_every_code_of_the_table_is_used() -> None:
    strings = string_constants()
    generated = {f"{kind}_{side}" for kind in ("integer", "decimal") for side in ("above_max_value", "below_min_value")}
    assert {code for code in ERRORS if code is not None} - generated - strings == set()


def test_what_a_retry_can_pass_says_so_and_what_it_repeats_forbids_it() -> None:
    for kind in ERRORS.values():
        names = {*kind.headers, *kind.varying_headers}
        if kind.status in (429, 503):
            assert {"retry-after", "retry-after-ms"} <= names, kind.code
        if kind.status == 500:
            assert kind.headers["x-should-retry"] == "false", kind.code
