"""Every causal class of transformers serves exactly, or is refused; the documentation has the list."""

from __future__ import annotations

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from model_runner_helpers.every_class import EXACT, architectures, verdict  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of many classes, at their import

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "models.md"
QUICK = ("FlintForCausalLM", "DeepseekV32ForCausalLM", "Lfm2ForCausalLM")


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in architectures()]
)
def test_it_is_exact_or_refused_and_the_documentation_says_so(architecture: str) -> None:
    found = verdict(architecture)
    if DOCUMENT.is_file() and f"result with transformers {transformers.__version__} |" in DOCUMENT.read_text():
        rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {found} | ")]
        assert any(f"`{architecture}`" in row for row in rows), f"tools/make_classes_table.py was not run: {found}"


@pytest.mark.skipif(not DOCUMENT.is_file(), reason="the documentation is not part of the distribution")
def test_the_documentation_lists_every_class_once() -> None:
    text = DOCUMENT.read_text()
    if f"result with transformers {transformers.__version__} |" not in text:
        pytest.skip("the list is of another version of transformers")
    listed = text.partition("<!-- every class: begin -->")[2].partition("<!-- every class: end -->")[0]
    assert all(listed.count(f"`{name}`") == 1 for name in architectures())
    assert f"| {EXACT} | " in listed
