"""Writes docs/server-flags.md from the declared options; with --check, says whether it is current."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from generated_page import write_page

from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.options.command_line import help_text, value_text
from llmstack_llm.options.option import Option, options_of
from llmstack_server.options.command_line import ALL_FOREIGN_FLAGS, KEY_FLAGS, SERVE_OPTIONS, VLLM_FLAGS

HEAD = """# Flags of `llmstack serve`

Names and defaults are vLLM's where it has them. An option has four forms:

| form | example |
|---|---|
| flag | `--max-model-len 4096` |
| environment variable | `LLMSTACK_MAX_MODEL_LEN=4096` |
| key in a file for `--config` | `max_model_len: 4096` |
| keyword in Python | `LLM(model, max_model_len=4096)`, for options marked with `py` |

The command line overrides the environment, the environment overrides the file, and the file overrides the default.
Errors are reported together, one line each, with exit code 2.

`llmstack serve --dry-run` with any line prints what every flag became, from which source, and what is missing. It loads
nothing, and exits with 0 or 1. `--assume-devices 8x80GiB` and `--assume-model` check a line for another machine.
`llmstack serve --help=all`, `--help=GROUP` and `--help=flag` show a part of this page.

- `-` and `_` are the same in names.
- A switch has a `--no-` form, such as `--no-enforce-eager`. In variables and files it is `true` or `false`.
- An option with several values (`...`) takes them one by one, or as a JSON array.
- A JSON object may be given key by key: `--speculative-config.method ngram`, or `-sc.method ngram` with the short form.
- Words of closed sets may be written in capitals.
- A switch may have a value: `--enforce-eager=true`, or `--enable-prefix-caching false` for its `--no-` form.

```yaml
model: gpt2
port: 8001
max_model_len: 512
enable-log-requests: true
allowed-origins: [https://chat.example]
speculative-config: {method: ngram, num_speculative_tokens: 5}
```

`tools/make_flags_page.py` writes this page.
"""
KEYWORD_HEAD = """
## Keywords without a flag

| keyword | |
|---|---|
"""
KEY_HEAD = """
## Flags that set one key

These flags of vLLM set one key of a JSON option. Files and keywords of Python take them, too.

| flag | the same as |
|---|---|
"""
REFUSED_HEAD = """
## Flags of vLLM that are refused

These flags end the start with the sentence below and exit code 2, unless their value is an accepted one. A switch also
has its `--no-` form, which is accepted where `false` is.

| flag | reason, and what to use | accepted values |
|---|---|---|
"""
ACCEPTED_HEAD = f"""
## Flags of vLLM that are accepted without effect

These flags tune what llmstack chooses itself. None changes tokens, log-probabilities, limits or security. Each is one
warning in the log and an entry of `flags_without_effect` in `/server_info`. The flags of vLLM {VLLM_FLAGS.version} are
all known by name.

| flag | why it has no effect |
|---|---|
"""


def page() -> str:
    """The text of the whole page."""
    return "".join(
        [
            HEAD,
            *_option_tables(SERVE_OPTIONS),
            KEYWORD_HEAD,
            *_keyword_rows(),
            KEY_HEAD,
            *(f"| `{flag}` | `{key}` |\n" for flag, key in KEY_FLAGS.items()),
            REFUSED_HEAD,
            *_refused_rows(),
            ACCEPTED_HEAD,
            *_accepted_rows(),
        ]
    )


def _option_tables(options: Iterable[Option]) -> Iterator[str]:
    title_to_rows: dict[str, list[str]] = {}
    for option in options:
        title_to_rows.setdefault(option.title, []).append(_row(option))
    for title, rows in title_to_rows.items():
        yield f"\n## {title}\n\n| flag | | |\n|---|---|---|\n" + "".join(rows)


def _row(option: Option) -> str:
    value = "" if option.is_switch else f" {_value(option)}"
    has_pair = option.is_switch and option.command_default in (None, option.declared.sets)
    names = [*option.flags, *(option.negative_flags[:1] if has_pair else ())]
    shown = ", ".join(f"`{name}{value if index == 0 else ''}`" for index, name in enumerate(names))
    others = [name for name in option.declared.environment if not name.startswith("LLMSTACK_")]
    text = help_text(option) + (f"; {', '.join(others)} also sets it" if others else "")
    keyword = "py" if option in options_of(EngineArgs) else ""
    return f"| {_cell(shown)} | {_cell(text)} | {keyword} |\n"


def _value(option: Option) -> str:
    text = value_text(option)
    if option.type.is_list:
        return f"{text} ..."
    return text if option.declared.value_without_text is None else f"[{text}]"


def _keyword_rows() -> Iterator[str]:
    for option in options_of(EngineArgs):
        if not option.declared.flag:
            yield f"| `{option.name}` | {_cell(help_text(option))} |\n"


def _refused_rows() -> Iterator[str]:
    for name, flag in sorted(ALL_FOREIGN_FLAGS.items()):
        if flag.is_accepted:
            continue
        accepted = ", ".join(f"`{value}`" if value else "none given" for value in flag.harmless)
        yield f"| `{name}` | {_cell(flag.reason)} | {accepted} |\n"


def _accepted_rows() -> Iterator[str]:
    for name, flag in sorted(ALL_FOREIGN_FLAGS.items()):
        if flag.is_accepted:
            names = f"`{name}`, `{flag.short}`" if flag.short else f"`{name}`"
            yield f"| {names} | {_cell(flag.reason)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    sys.exit(write_page("server-flags.md", page()))
