"""Every example of the README runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block {number}" for number in range(1, len(BLOCKS) + 1)])
def test_a_block_of_the_readme_runs(block):
    for package in ("torch", "transformers"):
        if re.search(rf"^(import|from) {package}\b", block, re.MULTILINE):
            pytest.importorskip(package)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_first_block_needs_the_standard_library_only():
    assert not re.search(r"torch|transformers", BLOCKS[0])
