"""One declaration: parser, variable, file, keyword, check, refusal and help of an option."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, replace
from typing import Any, Literal

import pytest

from llmstack_llm.engine_args import EngineArgs
from llmstack_llm.options.command_line import add_foreign_flags, add_options, help_text, value_text
from llmstack_llm.options.foreign import ForeignFlag, replaced_flags
from llmstack_llm.options.option import OptionGroup, options_of
from llmstack_llm.options.problem import OptionsError, Problem
from llmstack_llm.options.resolve import ConfigFile, Settings, resolve
from llmstack_types.options import option, option_group


@option_group
class TeaOptions(OptionGroup):
    title = "Tea"

    kind: Literal["green", "black"] = option(
        "green", flag="--tea-kind", aliases={"earl-grey": "black"}, environment=("OTHER_TEA",), help="what is brewed"
    )
    num_cups: int | None = option(
        None, short="-c", at_least=1, suffixes=True, replaces={"--cups": ("0",)}, help="how many"
    )
    strength: float = option(0.5, above=0, at_most=1, help="how strong")
    names: tuple[str, ...] = option((), flag="--drinker", help="who drinks")
    sizes: tuple[int, ...] = option((), flag="--cup-sizes", at_least=1, help="how large")
    has_milk: bool = option(False, flag="--enable-milk", help="with milk")
    has_sugar: bool = option(True, flag="--disable-sugar", sets=False, help="without sugar")
    water: Mapping[str, Any] | None = option(None, example='{"degrees": 90}', help="which water")
    password: str | None = option(None, secret=True, help="of the cupboard")
    mood: str = option("calm", flag="", help="a keyword alone")
    restarts: int = option(0, command_default=5, help="another default for commands")

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        if self.kind == "green" and self.has_milk:
            yield Problem("{kind} {value} and {has_milk} exclude each other", value=self.kind)


@option_group
class MyEngineArgs(EngineArgs):
    """What a diff of one place would add to the options of an engine."""

    kv_cache_colour: Literal["red", "blue"] = option("red", replaces={"--kv-color": ()}, help="colour of the KV cache")


OPTIONS = options_of(TeaOptions)
FOREIGN = {"--pot": ForeignFlag("tea is brewed in cups", ("none",)), **replaced_flags(OPTIONS)}


def settings_of(
    *line: str, environment: Mapping[str, str] | None = None, file: Mapping[str, Any] | None = None
) -> Settings:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser, OPTIONS)
    add_foreign_flags(parser, FOREIGN)
    config_file = None if file is None else ConfigFile("tea.yaml", file)
    return resolve(OPTIONS, parser.parse_args(line), environment or {}, config_file, FOREIGN)


def built(settings: Settings) -> TeaOptions:
    group = settings.build(TeaOptions)
    assert settings.problems == []
    assert group is not None
    return group


def test_one_declaration_is_a_flag_a_variable_a_key_a_keyword_a_check_a_refusal_and_a_row_of_help() -> None:
    options = options_of(MyEngineArgs)
    [mine] = [declared for declared in options if declared.key == "kv_cache_colour"]
    parser = argparse.ArgumentParser()
    add_options(parser, options)
    add_foreign_flags(parser, replaced_flags(options))

    def value(*line: str, environment: Mapping[str, str] | None = None, file: Mapping[str, Any] | None = None) -> Any:
        config_file = None if file is None else ConfigFile("f", file)
        found = resolve(options, parser.parse_args(line), environment or {}, config_file, replaced_flags(options))
        return found["kv_cache_colour"] if not found.problems else found.problems

    variable = {"LLMSTACK_KV_CACHE_COLOUR": "blue"}
    assert value() == "red"
    assert value("--kv-cache-colour", "blue") == "blue"
    assert value(environment=variable) == "blue"
    assert value(file={"--kv-cache-colour": "blue"}) == "blue"
    assert MyEngineArgs("m", kv_cache_colour="blue").kv_cache_colour == "blue"
    assert "kv_cache_colour" in [declared.name for declared in options_of(MyEngineArgs)]
    reason = "invalid value 'green'; choose from red, blue"
    assert value("--kv-cache-colour", "green") == [f"--kv-cache-colour: {reason}"]
    assert value(environment={"LLMSTACK_KV_CACHE_COLOUR": "green"}) == [f"LLMSTACK_KV_CACHE_COLOUR: {reason}"]
    assert value(file={"--kv-cache-colour": "green"}) == [f"--config f: kv-cache-colour: {reason}"]
    with pytest.raises(OptionsError, match=f"^kv_cache_colour: {reason}$"):
        MyEngineArgs("m", kv_cache_colour="green")  # type: ignore[arg-type]
    assert value("--kv-color", "red") == ["--kv-color: use --kv-cache-colour"]
    assert (value_text(mine), help_text(mine)) == ("{red,blue}", "colour of the KV cache (default: red)")
    assert "--kv-cache-colour {red,blue}" in parser.format_help()


@pytest.mark.parametrize(
    ("line", "environment", "file", "cups", "source"),
    [
        ((), {}, {}, None, "default"),
        ((), {}, {"--num-cups": 4}, 4, "--config tea.yaml"),
        ((), {"LLMSTACK_NUM_CUPS": "3"}, {"--num-cups": 4}, 3, "environment LLMSTACK_NUM_CUPS"),
        (("-c", "2"), {"LLMSTACK_NUM_CUPS": "3"}, {"--num-cups": 4}, 2, "command line"),
        (("-c", "2", "--num-cups", "1"), {}, {}, 1, "command line"),
        ((), {"LLMSTACK_NUM_CUPS": ""}, {"--num-cups": None}, None, "default"),
    ],
)
def test_the_line_overrides_the_environment_and_that_the_file(
    line: tuple[str, ...], environment: dict[str, str], file: dict[str, Any], cups: int | None, source: str
) -> None:
    settings = settings_of(*line, environment=environment, file=file)
    assert (built(settings).num_cups, settings.source("num_cups")) == (cups, source)
    assert settings.is_given("num_cups") == (source != "default")


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        (["--num-cups", "4k"], "num_cups", 4000),
        (["--num-cups", "1.5K"], "num_cups", 1536),
        (["--tea-kind", "earl-grey"], "kind", "black"),
        (["--drinker", "a", "b", "--drinker", '["c", "d"]'], "names", ("a", "b", "c", "d")),
        (["--cup-sizes", "[1, 2]", "3"], "sizes", (1, 2, 3)),
        (["--enable-milk", "--no-enable-milk"], "has_milk", False),
        (["--disable-sugar"], "has_sugar", False),
        (["--no-disable-sugar"], "has_sugar", True),
        (["--water", '{"degrees": 80}'], "water", {"degrees": 80}),
        ([], "restarts", 5),
    ],
)
def test_words_of_the_line_become_values(line: list[str], name: str, value: Any) -> None:
    assert getattr(built(settings_of(*line)), name) == value


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ({"--num-cups": "4K"}, "num_cups", 4096),
        ({"-c": 2}, "num_cups", 2),
        ({"--drinker": ["a", 7]}, "names", ("a", "7")),
        ({"--drinker": "a"}, "names", ("a",)),
        ({"--cup-sizes": [1, 2]}, "sizes", (1, 2)),
        ({"--no-disable-sugar": True}, "has_sugar", True),
        ({"--disable-sugar": True}, "has_sugar", False),
        ({"--disable-sugar": False}, "has_sugar", True),
        ({"--no-enable-milk": False}, "has_milk", False),
        ({"--strength": 1}, "strength", 1.0),
        ({"--water": {"degrees": 80}}, "water", {"degrees": 80}),
        ({"--water": {"degrees": 80, "hard": True}, "--water.degrees": 90}, "water", {"degrees": 90, "hard": True}),
        ({"--water.lime.ppm": 3}, "water", {"lime": {"ppm": 3}}),
    ],
)
def test_values_of_a_file_have_the_types_of_yaml(file: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(built(settings_of(file=file)), name) == value


@pytest.mark.parametrize(("text", "value"), [("1", True), ("YES", True), ("on", True), ("false", False), ("0", False)])
def test_a_switch_in_the_environment_is_true_or_false(text: str, value: bool) -> None:
    assert built(settings_of("--tea-kind", "black", environment={"LLMSTACK_ENABLE_MILK": text})).has_milk is value


def test_the_own_variable_comes_before_others() -> None:
    environment = {"OTHER_TEA": "black", "LLMSTACK_TEA_KIND": "green"}
    assert built(settings_of(environment=environment)).kind == "green"
    assert built(settings_of(environment={"OTHER_TEA": "black"})).kind == "black"


def test_none_takes_the_place_of_an_optional_value_and_is_no_secret() -> None:
    environment = {"LLMSTACK_NUM_CUPS": "5"}
    assert built(settings_of("--num-cups", "None", "--water", "None", environment=environment)).num_cups is None
    assert settings_of("--tea-kind", "None").problems
    assert settings_of("--password", "None")["password"] == "None"


FAULTS = [
    ("num_cups", "0", "must be at least 1, but is 0"),
    ("num_cups", str(2**63), "must lie between -9223372036854775807 and 9223372036854775807"),
    ("num_cups", "9" * 400, "must lie between -9223372036854775807 and 9223372036854775807"),
    ("num_cups", "k", "'k' is not an integer such as 4096, 4k or 4K"),
    ("strength", "0", "must be above 0 and at most 1, but is 0.0"),
    ("strength", "nan", "must be above 0 and at most 1, but is nan"),
    ("strength", "very", "'very' is not a number"),
    ("tea_kind", "blck", "invalid value 'blck'; did you mean 'black'?"),
    ("cup_sizes", "0", "must be at least 1, but is 0"),
    ("cup_sizes", "[1", "'[1' is not valid JSON: Expecting ',' delimiter: line 1 column 3 (char 2)"),
    ("drinker", "[1]", "'[1]' is not a JSON array of strings"),
    ("water", "[]", "[] is not a JSON object"),
]


@pytest.mark.parametrize(("key", "text", "reason"), FAULTS)
def test_a_fault_has_one_text_wherever_the_value_comes_from(key: str, text: str, reason: str) -> None:
    flag, variable = "--" + key.replace("_", "-"), f"LLMSTACK_{key.upper()}"
    assert settings_of(flag, text).problems == [f"{flag}: {reason}"]
    assert settings_of(environment={variable: text}).problems == [f"{variable}: {reason}"]
    in_file = settings_of(file={flag: text}).problems
    assert in_file == [f"--config tea.yaml: {flag.removeprefix('--')}: {reason}"]


@pytest.mark.parametrize(
    ("keywords", "line"),
    [
        ({"num_cups": 0}, "num_cups: must be at least 1, but is 0"),
        ({"num_cups": True}, "num_cups: True is not an integer"),
        ({"num_cups": 1.0}, "num_cups: 1.0 is not an integer"),
        ({"strength": "0.5"}, "strength: '0.5' is not a number"),
        ({"strength": None}, "strength: None is not a number"),
        ({"kind": "blck"}, "kind: invalid value 'blck'; did you mean 'black'?"),
        ({"names": "a"}, "names: 'a' is not a list"),
        ({"names": [1]}, "names: 1 is not a text"),
        ({"has_milk": 1}, "has_milk: 1 is not true or false"),
        ({"water": "[1"}, "water: '[1' is not valid JSON: Expecting ',' delimiter: line 1 column 3 (char 2)"),
    ],
)
def test_keywords_are_checked_as_they_are(keywords: dict[str, Any], line: str) -> None:
    with pytest.raises(OptionsError) as caught:
        TeaOptions(**keywords)
    assert str(caught.value) == line


def test_keywords_are_converted_to_one_form() -> None:
    options = TeaOptions(kind="earl-grey", names=["a"], water='{"degrees": 80}', strength=1)  # type: ignore[arg-type]
    assert (options.kind, options.names, options.water, options.strength) == ("black", ("a",), {"degrees": 80}, 1.0)


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(OptionsError) as caught:
        TeaOptions(num_cups=0, strength=2, names="a")  # type: ignore[arg-type]
    assert [line.partition(":")[0] for line in caught.value.lines()] == ["num_cups", "strength", "names"]
    settings = settings_of(
        "--num-cups",
        "0",
        "--cups",
        "--pot",
        "clay",
        environment={"LLMSTACK_STRENGTH": "2"},
        file={"--milk": 1, "--pot": 2},
    )
    assert settings.problems == [
        "--config tea.yaml: unknown key 'milk'",
        "--config tea.yaml: pot: tea is brewed in cups",
        "--cups: use --num-cups",
        "--pot: tea is brewed in cups",
        "--num-cups: must be at least 1, but is 0",
        "LLMSTACK_STRENGTH: must be above 0 and at most 1, but is 2.0",
    ]


def test_flags_of_others_pass_with_values_that_change_nothing() -> None:
    assert settings_of("--pot", "none", "--cups", "0").problems == []


def test_a_contradiction_has_the_names_that_the_user_knows() -> None:
    with pytest.raises(OptionsError, match=r"^kind green and has_milk exclude each other$"):
        TeaOptions(has_milk=True)
    settings = settings_of("--enable-milk")
    assert settings.build(TeaOptions) is None
    assert settings.problems == ["--tea-kind green and --enable-milk exclude each other"]


def test_a_contradiction_that_follows_from_a_fault_is_not_reported() -> None:
    settings = settings_of("--enable-milk", "--tea-kind", "blck")
    assert settings.build(TeaOptions) is None
    assert settings.problems == ["--tea-kind: invalid value 'blck'; did you mean 'black'?"]


def test_the_table_shows_each_option_with_its_source_and_no_secret() -> None:
    settings = settings_of("--password", "sesame", "--disable-sugar", environment={"LLMSTACK_STRENGTH": "1"})
    rows = {row[0]: row[1:] for row in (line.split(maxsplit=2) for line in settings.table().splitlines())}
    assert rows["--password"] == ["(hidden)", "command line"]
    assert rows["--disable-sugar"] == ["true", "command line"]
    assert rows["--strength"] == ["1.0", "environment LLMSTACK_STRENGTH"]
    assert rows["--tea-kind"] == ["green", "default"]
    assert "sesame" not in settings.table()


def test_a_long_value_widens_its_own_line_of_the_table_alone() -> None:
    water = json.dumps({"names": ["spring"] * 50})
    short, long = settings_of().table(), settings_of("--water", water).table()
    assert [line for line in long.splitlines() if "--water" not in line] == [
        line for line in short.splitlines() if "--water" not in line
    ]


def test_an_unknown_key_of_a_file_is_answered_with_a_key_that_a_file_may_have() -> None:
    assert settings_of(file={"--c": 3}).problems[0].endswith("unknown key 'c'")


def test_another_process_gets_the_same_settings() -> None:
    settings = settings_of("--drinker", "a", "--water", '{"degrees": 80}')
    again = Settings.from_plain(OPTIONS, settings.to_plain())
    assert built(again) == built(settings)
    assert again.table() == settings.table()


def test_a_group_is_a_frozen_value_of_its_fields():
    tea = TeaOptions(num_cups=2)
    assert tea == TeaOptions(num_cups=2) != TeaOptions(num_cups=3)
    assert hash(tea) == hash(replace(TeaOptions(), num_cups=2))
    assert tea != MyEngineArgs("m")
    assert repr(tea).startswith("TeaOptions(kind='green', num_cups=2, strength=0.5, ")
    for change in (lambda: setattr(tea, "kind", "black"), lambda: delattr(tea, "kind")):
        with pytest.raises(FrozenInstanceError, match="kind"):
            change()
    assert tea.kind == "green"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TeaOptions("green"), "at most 0 positional"),  # type: ignore[misc]  # what is refused
        (lambda: TeaOptions(colour="red"), "unexpected keyword argument 'colour'"),  # type: ignore[call-arg]  # as above
        (lambda: EngineArgs(), "missing the argument 'model'"),  # type: ignore[call-arg]  # as above
        (lambda: EngineArgs("a", "b"), "at most 1 positional"),  # type: ignore[misc]  # as above
        (lambda: EngineArgs("a", model="b"), "two values of 'model'"),  # type: ignore[misc]  # as above
    ],
)
def test_arguments_that_are_not_fields_are_a_type_error(make: Callable[[], object], message: str):
    with pytest.raises(TypeError, match=message):
        make()
