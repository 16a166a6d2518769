"""Every encoder of text of transformers is exact, or refused; the documentation has the list."""

from __future__ import annotations

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from model_runner_helpers.every_encoder import BY_LENGTH, PACKED, architectures, verdict  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of many classes, at their import

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "embeddings.md"
IS_CURRENT = DOCUMENT.is_file() and f"result with transformers {transformers.__version__} |" in DOCUMENT.read_text()


@pytest.mark.full
@pytest.mark.parametrize("architecture", architectures())
def test_it_is_exact_or_refused_and_the_documentation_says_so(architecture: str) -> None:
    found = verdict(architecture)
    if IS_CURRENT:
        rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {found} | ")]
        assert any(f"`{architecture}`" in row for row in rows), f"make_classes_table.py --encoders was not run: {found}"


@pytest.mark.skipif(not IS_CURRENT, reason="the documentation is absent, or of another version of transformers")
def test_the_documentation_lists_every_class_once() -> None:
    listed = DOCUMENT.read_text().partition("<!-- every class: begin -->")[2].partition("<!-- every class: end -->")[0]
    assert all(listed.count(f"`{name}`") == 1 for name in architectures())
    assert f"| {PACKED} | " in listed
    assert f"| {BY_LENGTH} | " in listed
