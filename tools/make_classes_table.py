"""Writes the tables of classes of transformers in docs; takes some minutes.

Causal ones stand in docs/models.md and, with `--encoders`, encoders in docs/embeddings.md.

Names on the command line are tried again alone; the results of the others stay.
"""

from __future__ import annotations

import importlib
import re
import sys

from generated_page import DOCS, write_page

HELPERS = DOCS.parent / "packages" / "model-runner" / "tests" / "helpers"
BEGIN = "<!-- every class: begin -->\n"
END = "<!-- every class: end -->\n"


def page(name: str, module: str) -> str:
    """The page with the table between its marks replaced."""
    sys.path.insert(0, str(HELPERS))
    every_class = importlib.import_module(f"model_runner_helpers.{module}")
    before, mark, rest = (DOCS / name).read_text(encoding="utf-8").partition(BEGIN)
    listed, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{name} has no marks for the table")
    again = [name for name in sys.argv[1:] if not name.startswith("-")]
    known = _results(listed) if again else {}
    verdicts = {}
    for architecture in every_class.architectures():
        is_known = architecture in known and architecture not in again
        verdicts[architecture] = known[architecture] if is_known else every_class.verdict(architecture)
        print(f"{architecture}: {verdicts[architecture]}", file=sys.stderr)
    return f"{before}{BEGIN}{every_class.table(verdicts)}{END}{after}"


def _results(listed: str) -> dict[str, str]:
    """Class to its result, of a table."""
    rows = [re.fullmatch(r"\| (.*) \| \d+ \| (.*) \|", line) for line in listed.splitlines()]
    return {name: row[1] for row in rows if row for name in re.findall(r"`(\w+)`", row[2])}


if __name__ == "__main__":
    of_encoders = "--encoders" in sys.argv
    chosen = ("embeddings.md", "every_encoder") if of_encoders else ("models.md", "every_class")
    sys.exit(write_page(chosen[0], page(*chosen)))
