"""The completion script for fish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmstack_command.completion.tree import Flag, Level

_HEAD = """\
# Completion of llmstack for fish, written by `llmstack completion fish`.
function __llmstack_at --description 'whether these words follow llmstack'
    set -l typed (commandline -opc)
    test (count $typed) -gt (count $argv); or return 1
    set -l last (math 1 + (count $argv))
    test "$typed[2..$last]" = "$argv"
end
complete -c llmstack -f
"""


def fish_script(levels: Sequence[Level]) -> str:
    """The script, which starts no process when it completes."""
    return _HEAD + "\n".join(line for level in levels for line in _level_lines(level)) + "\n"


def _level_lines(level: Level) -> Iterator[str]:
    if len(level.words) == 1:
        yield f"complete -c llmstack -n '__fish_use_subcommand' -a {level.words[0]} -d {_quoted(level.help)}"
    begin = f"complete -c llmstack -n '__llmstack_at {' '.join(level.words)}'"
    if level.values:
        yield f"{begin} -a {_quoted(' '.join(level.values))}"
    if level.has_positional:
        yield f"{begin} -F"
    for flag in level.flags:
        yield f"{begin} {_flag_words(flag)} -d {_quoted(flag.help)}"


def _flag_words(flag: Flag) -> str:
    words = []
    for name in flag.names:
        bare = name.lstrip("-")
        kind = "-l" if name.startswith("--") else "-s" if len(bare) == 1 else "-o"
        words.append(f"{kind} {bare}")
    if flag.choices:
        words.append(f"-x -a {_quoted(' '.join(flag.choices))}")
    elif flag.has_value:
        words.append("-r -F" if flag.is_file else "-x")
    return " ".join(words)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
