"""The completion script for zsh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmstack_command.completion.tree import Flag, Level

_SCRIPT = """\
#compdef llmstack
# Completion of llmstack for zsh, written by `llmstack completion zsh`.
_llmstack() {{
    local level="$words[2]"
    if (( CURRENT == 2 )); then
        local -a commands=(
{commands}
        )
        _describe -t commands 'command' commands
        return
    fi
    case "$level" in {groups}) (( CURRENT > 3 )) && level+=" $words[3]" ;; esac
    shift words
    (( CURRENT-- ))
    if [[ $level == *' '* ]]; then
        shift words
        (( CURRENT-- ))
    fi
    case "$level" in
{levels}
    esac
}}

# Read by `source`, or loaded from $fpath at the first TAB.
if [[ $funcstack[1] == _llmstack ]]; then
    _llmstack "$@"
else
    compdef _llmstack llmstack
fi
"""


def zsh_script(levels: Sequence[Level]) -> str:
    """The script, which starts no process when it completes."""
    commands = [f"            '{level.words[0]}:{_quoted(level.help)}'" for level in levels if len(level.words) == 1]
    return _SCRIPT.format(
        commands="\n".join(commands),
        groups="|".join(sorted({level.words[0] for level in levels if len(level.words) > 1})) or "-",
        levels="\n".join(_level_case(level) for level in levels),
    )


def _level_case(level: Level) -> str:
    specs = [spec for flag in level.flags for spec in _flag_specs(flag)]
    if level.values:
        specs.append(f"'1:value:({' '.join(level.values)})'")
    if level.has_positional:
        specs.append("'*:file:_files'")
    lines = " \\\n                ".join(specs)
    return f"        '{' '.join(level.words)}')\n            _arguments \\\n                {lines} ;;"


def _flag_specs(flag: Flag) -> Iterator[str]:
    for name in flag.names:
        spec = f"{name}[{_quoted(flag.help)}]"
        if flag.has_value:
            spec += f":value:{_action(flag)}"
        yield f"'{spec}'"


def _action(flag: Flag) -> str:
    if flag.choices:
        return f"({' '.join(flag.choices)})"
    return "_files" if flag.is_file else " "


def _quoted(text: str) -> str:
    """Escapes the characters that have a meaning for `_arguments` and `_describe` in single quotes."""
    for special in ("\\", "[", "]", ":"):
        text = text.replace(special, "\\" + special)
    return text.replace("'", "'\\''")
