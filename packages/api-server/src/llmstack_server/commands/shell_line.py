"""The command that starts another engine, in a line of shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_LINE_CHARS = 65_536
_MODULES: Mapping[str, str] = {
    "vllm.entrypoints.openai.api_server": "vllm", "vllm.entrypoints.api_server": "vllm",
    "sglang.launch_server": "sglang", "sglang_router.launch_server": "sglang",
    "llama-server": "llama.cpp", "llama-server.exe": "llama.cpp",
}  # fmt: skip
_PROGRAMS: Mapping[str, str] = {"vllm": "vllm", "vllm.entrypoints.cli.main": "vllm", "sglang": "sglang"}
_IMAGES: Mapping[str, re.Pattern[str]] = {
    # Those of vLLM itself, and those that others publish in a repository of that name.
    "vllm": re.compile(r"(.*/)?vllm-openai[\w.-]*([:@].*)?|([\w.-]+(:\d+)?/)+vllm[\w.-]*(:[\w.-]+|@sha256:\w+)?"),
    "llama.cpp": re.compile(r"(.*/)?llama\.cpp:server.*"),
}
# Other subcommands of vLLM, which are subcommands here too.
_NO_SERVERS = ("bench", "chat", "complete", "run-batch", "collect-env")
_SHELL_OPTION = re.compile(r"-[a-z]*c")
_REDIRECTION = re.compile(r"(\d*|&)(>>?|<)(&?\S*)")
_ASSIGNMENT = re.compile(r"(?:--env=|-e)?([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_COMMENT_LINE = re.compile(r"^\s*#.*$", re.MULTILINE)
_EXPANSION = re.compile("\ue000(?:\\{(\\w+)\\}|(\\w+))")
_ENDS = frozenset("\n;|&")
VARIABLE = "\ue000"
"""Takes the place of a `$` that the shell would expand, so that it is distinguished from one in single quotes."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """A command that starts an engine.

    Attributes:
        engine: Its name.
        words: The flags and values; `VARIABLE` stands where the shell would put the value of a variable that the line
            does not set.
        variables: Environment variables that the line sets, and does not use itself.
    """

    engine: str
    words: tuple[str, ...]
    variables: Mapping[str, str]


def find_command(text: str) -> EngineCommand:
    """The command of an engine in a line that may have variables, wrappers, containers and other commands too.

    Raises:
        ValueError: There is none; one sentence.
    """
    if len(text) > MAX_LINE_CHARS:
        raise ValueError(f"the line has more than {MAX_LINE_CHARS} characters")
    variables: dict[str, str] = {}
    for words in _commands(text):
        start = _start_of(words)
        before = words if start is None else words[: start[1]]
        variables |= {found[1]: found[2] for word in before if (found := _ASSIGNMENT.fullmatch(word))}
        if start is not None:
            return _expanded(start[0], words[start[1] :], variables)
        inner = next((words[index + 1] for index in range(len(words) - 1) if _SHELL_OPTION.fullmatch(words[index])), "")
        if "serve" in inner:  # bash -c 'vllm serve …'
            command = find_command(inner.replace(VARIABLE, "$"))
            return _expanded(command.engine, command.words, {**variables, **command.variables})
    raise ValueError("the line starts neither vllm serve nor sglang.launch_server nor llama-server")


def _expanded(engine: str, words: Iterable[str], variables: Mapping[str, str]) -> EngineCommand:
    used: set[str] = set()

    def value_of(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        used.add(name)
        return variables.get(name, found[0])

    expanded = tuple(_EXPANSION.sub(value_of, word) for word in words)
    return EngineCommand(engine, expanded, {name: value for name, value in variables.items() if name not in used})


def join(words: Iterable[str]) -> str:
    """Words as they are written in a shell, which expands the variables that the line had."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if VARIABLE not in word:
        return shlex.quote(word)
    escaped = re.sub(r'([\\"`$])', r"\\\1", word).replace(VARIABLE, "$")
    return f'"{escaped}"'


def _commands(text: str) -> Iterator[list[str]]:
    """The commands of a text, without redirections and comments."""
    marked = _COMMENT_LINE.sub("", _mark_variables(text.replace("\r", "").replace("\\\n", " ")))
    lexer = shlex.shlex(marked, posix=True, punctuation_chars="\n;|")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
    try:
        tokens = list(lexer)
    except ValueError as error:
        raise ValueError(f"the line is not complete: {error}") from None
    words: list[str] = []
    rest = iter(tokens)
    for token in rest:
        found = _REDIRECTION.fullmatch(token)
        if token and _ENDS.issuperset(token):
            yield words
            words = []
        elif found is not None:
            if not found[3]:
                next(rest, None)
        elif token.startswith("#"):
            while (token := next(rest, "\n")) and "\n" not in token:
                pass
            yield words
            words = []
        else:
            words.append(token)
    yield words


def _mark_variables(text: str) -> str:
    """The text with `VARIABLE` for each `$` of a variable that is not in single quotes and not escaped."""
    marked: list[str] = []
    quote = ""
    is_escaped = False
    for index, char in enumerate(text):
        if char in ("'", '"') and not is_escaped and quote in ("", char):
            quote = "" if quote else char
        is_variable = (
            char == "$" and quote != "'" and not is_escaped and re.match(r"\{?[A-Za-z_]", text[index + 1 : index + 3])
        )
        marked.append(VARIABLE if is_variable else char)
        is_escaped = char == "\\" and quote != "'" and not is_escaped
    return "".join(marked)


def _start_of(words: Sequence[str]) -> tuple[str, int] | None:
    """The engine that a command starts, and where its flags begin.

    Raises:
        ValueError: It is a command of vLLM that starts no server.
    """
    for index, word in enumerate(words):
        name, following = Path(word).name, words[index + 1 : index + 2]
        if name in _PROGRAMS and following == ["serve"]:
            return _PROGRAMS[name], index + 2
        if name == "vllm" and following and following[0] in _NO_SERVERS:
            raise ValueError(f"vllm {following[0]} starts no server; llmstack {following[0]} is the command for it")
        if name in _MODULES:
            return _MODULES[name], index + 1
    for index, word in enumerate(words):
        for engine, image in _IMAGES.items():
            if image.fullmatch(word):  # an entry point before it may take a subcommand
                return engine, index + 1 + (words[index + 1 : index + 2] == ["serve"])
    return None
