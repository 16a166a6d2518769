"""Writes the table of all causal classes of transformers in docs/models.md; takes some minutes."""

from __future__ import annotations

import importlib
import sys

from generated_page import DOCS, write_page

HELPERS = DOCS.parent / "packages" / "model-runner" / "tests" / "helpers"
PAGE = "models.md"
BEGIN = "<!-- every class: begin -->\n"
END = "<!-- every class: end -->\n"


def page() -> str:
    """The page with the table between its marks replaced."""
    sys.path.insert(0, str(HELPERS))
    every_class = importlib.import_module("model_runner_helpers.every_class")
    verdicts = {}
    for architecture in every_class.architectures():
        verdicts[architecture] = every_class.verdict(architecture)
        print(f"{architecture}: {verdicts[architecture]}", file=sys.stderr)
    before, mark, rest = (DOCS / PAGE).read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{PAGE} has no marks for the table")
    return f"{before}{BEGIN}{every_class.table(verdicts)}{END}{after}"


if __name__ == "__main__":
    sys.exit(write_page(PAGE, page()))
