"""The table of model code in the documentation is written from the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "make_models_page.py"


def test_the_table_is_written_from_the_code() -> None:
    result = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"run: python tools/make_models_page.py\n{result.stdout}{result.stderr}"


@pytest.mark.full
def test_a_page_with_another_table_is_not_current(tmp_path: Path) -> None:
    page = TOOL.parent.parent / "docs" / "models.md"
    (tmp_path / "models.md").write_text(page.read_text(encoding="utf-8").replace("`gptq`", "`gptk`"), encoding="utf-8")
    program = (
        f"import sys, pathlib; sys.path.insert(0, {str(TOOL.parent)!r}); sys.argv.append('--check')\n"
        f"import generated_page; generated_page.DOCS = pathlib.Path({str(tmp_path)!r})\n"
        "import make_models_page as tool\n"
        "sys.exit(tool.write_page(tool.PAGE, tool.page()))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "not current" in result.stdout, result.stdout + result.stderr
