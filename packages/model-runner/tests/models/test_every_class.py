"""Every causal class of transformers serves exactly, or is refused; the documentation has the list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from model_runner_helpers.every_class import EXACT, NATIVE, architectures, verdict  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of many classes, at their import

ROOT = Path(__file__).resolve().parents[4]
DOCUMENT = ROOT / "docs" / "models.md"
FAMILIES = next(
    (path for folder in (ROOT, ROOT.parent) if (path := folder / "shared/reference/families.md").is_file()), None
)
# RecurrentGemma, RWKV, xLSTM, Zaya and DeepSeek V4 keep states, and Inkling has biases of positions. The row of Qwen
# 3.8 with sparse attention names no class.
REFUSED = {
    "?", "DeepseekV4ForCausalLM", "InklingForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM",
    "ZayaForCausalLM", "xLSTMForCausalLM",
}  # fmt: skip
QUICK = ("FlintForCausalLM", "AXK2ForCausalLM", "Lfm2ForCausalLM")


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
    listed = rows_of(text)
    assert all(listed.count(f"`{name}`") == 1 for name in architectures())
    assert f"| {EXACT} | " in listed


@pytest.mark.skipif(not DOCUMENT.is_file() or FAMILIES is None, reason="no list of families is beside the repository")
def test_nearly_all_decoders_that_people_serve_are_exact() -> None:
    assert FAMILIES is not None
    demanded = re.findall(r"^\| *\d* *\| `([^`]+)` \|", FAMILIES.read_text(), flags=re.MULTILINE)
    served = {
        name
        for row in rows_of(DOCUMENT.read_text()).splitlines()
        if row.startswith((f"| {EXACT} |", f"| {NATIVE} |"))
        for name in re.findall(r"`(\w+)`", row)
    }
    assert len(demanded) == 102
    assert {name for name in demanded if name not in served} == REFUSED
    assert sum(name in served for name in demanded) == 95


def rows_of(text: str) -> str:
    """The table of classes in the page."""
    return text.partition("<!-- every class: begin -->")[2].partition("<!-- every class: end -->")[0]
