"""`--translate LINE`: the command of another engine as one of llmstack."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmstack_llm.options.foreign import foreign_flag, value_of
from llmstack_llm.options.option import Option
from llmstack_server.commands.shell_line import VARIABLE, find_command, join
from llmstack_server.options.command_line import ALL_FOREIGN_FLAGS, KEY_FLAGS, SERVE_OPTIONS
from llmstack_server.options.environment import ignored_variables

_FOREIGN_VARIABLES = ("SGLANG_", "SGL_", "LLAMA_", "GGML_")
_ATTACHED = re.compile(r"-[a-zA-Z]\d+")
"""A short flag and its number in one word, such as `-O3`."""
_FILE = Path(__file__).with_name("other_engines.json")


@dataclass(frozen=True, slots=True)
class Engine:
    """The flags of one version of an engine.

    Attributes:
        defaults: Flags of ours with the values that this engine has where the line says nothing.
        flags, switches: Flag to ours; a switch may become a flag with a value.
        values: Flag of ours to the values that have other names there; an empty name leaves the flag out.
        notes: Flag to what differs.
        without_effect: Flag to the reason.
        switches_without_effect: The flags without effect that take no value.
        refused: Flag to what is missing, and what to use.
        comma_lists: Flags whose value is several, with commas between them.
        always: Differences whatever the line says.
        variables: Variable to its values, and to the flag that each stands for; an empty value stands for any other
            one, which takes the place of braces.
    """

    name: str
    version: str
    defaults: Mapping[str, str]
    flags: Mapping[str, str]
    switches: Mapping[str, str]
    values: Mapping[str, Mapping[str, str]]
    notes: Mapping[str, str]
    without_effect: Mapping[str, str]
    switches_without_effect: Sequence[str]
    refused: Mapping[str, str]
    comma_lists: Sequence[str]
    always: Sequence[str]
    variables: Mapping[str, Mapping[str, str]]


@dataclass(slots=True)
class Translation:
    """A command of llmstack.

    Attributes:
        words: The words after `llmstack serve`.
        variables: Variables that are set in its environment.
        differences: A sentence for each difference that does not matter to a start.
        missing: A sentence for each thing that has no counterpart.
    """

    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        variables = [f"{name}={join([value])}" for name, value in self.variables.items()]
        line = " ".join([*variables, join(["llmstack", "serve", *self.words])])
        return "\n".join([line, *(f"# {sentence}" for sentence in self.differences)])


def translate(text: str) -> Translation:
    """The command line of vLLM, SGLang or llama.cpp as one of llmstack.

    Raises:
        ValueError: The text is no such line; one sentence.
    """
    command = find_command(text)
    engine, rest = read_engines()[command.engine], list(command.words)
    found = Translation()
    while rest:
        _take_flag(engine, rest, found)
    _add_defaults(engine, found)
    _add_variables(engine, command.variables, found)
    return found


def read_engines() -> dict[str, Engine]:
    """The engines whose lines can be translated."""
    found = json.loads(_FILE.read_text(encoding="utf-8"))
    return {name: Engine(name, **fields) for name, fields in found.items()}


def _take_flag(engine: Engine, rest: list[str], found: Translation) -> None:
    """Takes the first flag of `rest` with its values."""
    word = rest.pop(0)
    if not word.startswith("-") or word == "-":
        found.words.append(word)
        return
    flag, equals, value = word.partition("=")
    if engine.name == "vllm" and _ATTACHED.fullmatch(word):
        flag, equals, value = word[:2], "=", word[2:]
    flag = _normalised(flag)
    given = [value] if equals else []
    option = _option_of(engine.flags.get(flag, flag).partition(".")[0])
    is_switch = not equals and _is_switch(engine, flag, option)
    is_list = option is not None and option.type.is_list
    while not is_switch and not equals and rest and (is_list or not given) and not _is_flag(rest[0]):
        given.append(rest.pop(0))
    if flag in engine.refused:
        found.missing.append(f"{flag}: {engine.refused[flag]}")
    elif flag in engine.without_effect:
        found.differences.append(f"{join([flag, *given])} has no effect: {engine.without_effect[flag]}")
    elif flag in engine.switches:
        found.words += engine.switches[flag].split("=")
    elif flag in engine.flags or engine.name == "vllm":
        _add_ours(engine, flag, given, found)
    else:
        found.missing.append(f"{flag}: nothing here is known to correspond to this flag of {engine.name}")


def _add_ours(engine: Engine, flag: str, given: Sequence[str], found: Translation) -> None:
    ours = engine.flags.get(flag, KEY_FLAGS.get(flag, flag))
    base = ours.partition(".")[0]
    if flag in engine.notes:
        found.differences.append(f"{flag} {engine.notes[flag]}")
    option = _option_of(base)
    if option is not None:
        names = engine.values.get(ours, {})
        values = [names.get(value, value) for value in given]
        if flag in engine.comma_lists:
            values = [entry for value in values for entry in value.split(",")]
        if values == [""] and given != [""]:
            return
        if base == ours and (reason := _wrong_value(option, values)):
            found.missing.append(f"{ours}: {reason}")
            return
        found.words += [ours] if option.is_switch and engine.name != "vllm" else [ours, *values]
        reason = option.reason_for(values[-1]) if values else ""
        found.differences += [f"{join([ours, *values])}: {reason}"] if reason else []
        return
    foreign = foreign_flag(ALL_FOREIGN_FLAGS, base)
    if foreign is None:
        found.missing.append(f"{flag}: unknown flag")
        return
    value = value_of(base, given)
    refusal = foreign.refusal(value) if base == ours else "" if foreign.is_accepted else foreign.reason
    if refusal:
        found.missing.append(f"{flag}: {refusal}")
    else:
        found.differences.append(f"{join([flag, *given])} has no effect: {foreign.reason}")


def _add_defaults(engine: Engine, found: Translation) -> None:
    """Writes out what the other engine does where its line says nothing, and ours does otherwise."""
    found.differences += engine.always
    for flag, value in engine.defaults.items():
        if flag not in found.words and "--uds" not in found.words:
            found.words += [flag, value]
            found.differences.append(f"{flag} {value} is the default of {engine.name}")


def _add_variables(engine: Engine, variables: Mapping[str, str], found: Translation) -> None:
    """Keeps what programs read, writes flags for what has one, and names what only the other engine reads."""
    for name, value in variables.items():
        values = engine.variables.get(name, {})
        if template := values.get(value, values.get("", "")):
            flag, equals, text = template.partition("=")
            found.words += [flag, text.format(value)] if equals else [flag]
        elif not ignored_variables([name], SERVE_OPTIONS) and not name.startswith(_FOREIGN_VARIABLES):
            found.variables[name] = value
        elif name.startswith("LLAMA_ARG_"):
            found.missing.append(f"{name}: write it as a flag of llama-server")
        else:
            found.differences.append(f"the variable {name} has no effect")


def _wrong_value(option: Option, values: Sequence[str]) -> str:
    """Why `llmstack serve` refuses the values of an option; empty where the shell alone knows one."""
    if any(VARIABLE in value for value in values) or option.is_switch:
        return ""
    if not values:
        return "" if option.declared.value_without_text is not None else "expected a value"
    try:
        for value in values if option.type.is_list else values[-1:]:
            option.from_text(value)
    except ValueError as error:
        return str(error)
    return ""


def _normalised(flag: str) -> str:
    """`--max_model_len` as `--max-model-len`; keys after a dot stay."""
    base, dot, keys = flag.partition(".")
    return (base.replace("_", "-") if base.startswith("--") else base) + dot + keys


def _option_of(flag: str) -> Option | None:
    return next((option for option in SERVE_OPTIONS if flag in (*option.flags, *option.negative_flags)), None)


def _is_switch(engine: Engine, flag: str, option: Option | None) -> bool:
    if flag in engine.switches or flag in engine.switches_without_effect:
        return True
    if engine.name != "vllm":
        return False
    foreign = foreign_flag(ALL_FOREIGN_FLAGS, flag)
    return option.is_switch if option is not None else foreign is not None and foreign.is_switch


def _is_flag(word: str) -> bool:
    """Whether a word is a flag, not a negative number."""
    return word.startswith("-") and not word[1:2].isdigit() and word != "-"
