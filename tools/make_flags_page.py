"""Writes docs/server-flags.md from the parser of `llmstack serve`; with --check, says whether it is current."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from llmstack_server.commands import ServeCommand
from llmstack_server.refused_flags import REFUSALS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "server-flags.md"
HEAD = """# Flags of `llmstack serve`

Names and defaults are vLLM's where it has them. `-` and `_` mean the same, JSON may be given key by key
(`--speculative-config.method ngram`), and `--config FILE` reads flags from YAML; those on the line win:

```yaml
model: gpt2
port: 8001
max_model_len: 512
enable-log-requests: true
allowed-origins: [https://chat.example]
speculative-config: {method: ngram, num_speculative_tokens: 5}
```

A flag that is not listed is an error that names the nearest one. This page is written by `tools/make_flags_page.py`.
"""
REFUSED_HEAD = """
## Refused

Flags of vLLM that have no meaning here end the start with the sentence below and exit code 2, unless their value
changes nothing.

| flag | why, and what to use | accepted values |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    parts = [HEAD]
    for group in parser._action_groups:  # argparse shows its groups under no public name
        rows = [_row(action) for action in group._group_actions if _is_shown(action)]
        if rows:
            parts.append(f"\n## {_title(group.title or '')}\n\n| flag | |\n|---|---|\n" + "".join(rows))
    return "".join([*parts, REFUSED_HEAD, *_refused_rows()])


def _title(text: str) -> str:
    return text[:1].upper() + text[1:]


def _is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and action.dest != "help"


def _row(action: argparse.Action) -> str:
    negative = [name for name in action.option_strings if name.startswith("--no-")]
    positive = [name for name in action.option_strings if name not in negative]
    names = [*positive, *negative[:1]] or [str(action.metavar)]
    value = "" if action.nargs == 0 or not action.option_strings else f" {_value(action)}"
    shown = ", ".join(f"`{name}{value if index == 0 else ''}`" for index, name in enumerate(names))
    return f"| {_cell(shown)} | {_cell(action.help or '')} |\n"


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    shown = str(action.metavar) if action.metavar else action.dest.rpartition("_")[2].upper()
    return f"{shown} ..." if action.nargs == "+" else f"[{shown}]" if action.nargs == "?" else shown


def _refused_rows() -> Iterator[str]:
    for flag, refusal in sorted(REFUSALS.items()):
        accepted = ", ".join(f"`{value}`" if value else "none given" for value in refusal.harmless)
        yield f"| `{flag}` | {_cell(refusal.reason)} | {accepted} |\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        is_current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is {'' if is_current else 'not '}as the parser says")
        return 0 if is_current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
