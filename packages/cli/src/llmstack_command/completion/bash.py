"""The completion script for bash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmstack_command.completion.tree import Flag, Level

# bash passes `--flag=value` as three words, split at the equals sign.
_SCRIPT = """\
# Completion of llmstack for bash, written by `llmstack completion bash`.
_llmstack_files() {{
    local IFS=$'\\n'
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -f -- "$1"))
}}

_llmstack() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" level flags values
    COMPREPLY=()
    if [[ $current == = ]]; then
        current=
    elif [[ $previous == = ]]; then
        previous="${{COMP_WORDS[COMP_CWORD-2]}}"
    fi
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
        return
    fi
    level="${{COMP_WORDS[1]}}"
    case "$level" in {groups}) (( COMP_CWORD > 2 )) && level+=" ${{COMP_WORDS[2]}}" ;; esac
    case "$level $previous" in
{choices}
{files}
{values}
    esac
    case "$level" in
{levels}
        *) return ;;
    esac
    if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$current"))
    elif [[ $values == "<file>" ]]; then
        _llmstack_files "$current"
    else
        COMPREPLY=($(compgen -W "$values" -- "$current"))
    fi
}}

complete -F _llmstack llmstack
"""


def bash_script(levels: Sequence[Level]) -> str:
    """The script, which starts no process when it completes."""
    pairs = [(level, flag) for level in levels for flag in level.flags if flag.has_value]
    reply = 'COMPREPLY=($(compgen -W "{}" -- "$current")); return ;;'
    return _SCRIPT.format(
        commands=" ".join(["--help", "--version", *(level.words[0] for level in levels if len(level.words) == 1)]),
        groups="|".join(sorted({level.words[0] for level in levels if len(level.words) > 1})) or "-",
        choices="\n".join(_case([pair], reply.format(" ".join(pair[1].choices))) for pair in pairs if pair[1].choices),
        files=_case((pair for pair in pairs if pair[1].is_file), '_llmstack_files "$current"; return ;;'),
        values=_case((pair for pair in pairs if not pair[1].is_file and not pair[1].choices), "return ;;"),
        levels="\n".join(_level_case(level) for level in levels),
    )


def _case(pairs: Iterable[tuple[Level, Flag]], action: str) -> str:
    """One branch for several flags of several levels, or an empty text."""
    patterns = [f'"{" ".join(level.words)} {name}"' for level, flag in pairs for name in flag.names]
    return f"        {'|'.join(patterns)}) {action}" if patterns else ""


def _level_case(level: Level) -> str:
    flags = " ".join(name for flag in level.flags for name in flag.names)
    values = " ".join(level.values) or ("<file>" if level.has_positional else "")
    return f'        "{" ".join(level.words)}") flags="{flags}" values="{values}" ;;'
