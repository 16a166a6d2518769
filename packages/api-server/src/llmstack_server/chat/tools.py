"""Checks of `tools` and `tool_choice`."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from llmstack_llm import request_errors
from llmstack_server.web.errors import missing_parameter

MAX_TOOLS = 128
MAX_NAME_CHARS = 64
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-")
TOOL_CHOICES = ("none", "auto", "required")
"""What `tool_choice` may be, if it names no function."""


class ToolMode(StrEnum):
    """Whether the model may call functions."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


FORCED_MODES = (ToolMode.REQUIRED, ToolMode.NAMED)
"""Modes in which the answer consists of calls only."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The checked tools of one chat.

    Attributes:
        tools: The tools for the template.
        functions: Name to the JSON schema of the parameters, which has at least the type `object`.
        strict_names: Functions whose calls must follow their schema.
        name: The function that `NAMED` chooses.
        is_parallel: Whether there may be several calls.
        grammar: Lark grammar of the text of the call, in place of arguments; only with `NAMED`.
    """

    mode: ToolMode = ToolMode.NONE
    tools: Sequence[Mapping[str, Any]] = ()
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    strict_names: frozenset[str] = frozenset()
    name: str = ""
    is_parallel: bool = True
    grammar: str | None = None

    @property
    def name_index(self) -> int:
        """The index of the chosen function among the tools."""
        return next(index for index, tool in enumerate(self.tools) if tool["function"]["name"] == self.name)

    @property
    def is_forced(self) -> bool:
        """Whether the answer consists of calls only."""
        return self.mode in FORCED_MODES


def check_tools(tools: Sequence[Mapping[str, object]] | None, choice: object, *, is_parallel: bool = True) -> ToolUse:
    """The tools and the choice among them.

    Raises:
        InvalidRequestError: Names the tool and the invalid field.
    """
    if tools is None:
        return _without_tools(choice)
    if not tools:
        raise request_errors.empty_array("tools")
    if len(tools) > MAX_TOOLS:
        raise request_errors.array_too_long("tools", MAX_TOOLS, len(tools))
    functions = [_function(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    mode, name, allowed = _choice(choice, [function["name"] for function in functions])
    return ToolUse(
        mode,
        [tool for tool, function in zip(tools, functions, strict=True) if function["name"] in allowed],
        {entry["name"]: _schema(entry.get("parameters")) for entry in functions if entry["name"] in allowed},
        frozenset(function["name"] for function in functions if function.get("strict") is True),
        name,
        is_parallel,
    )


def _without_tools(choice: object) -> ToolUse:
    if choice not in (None, "none", "auto"):
        raise request_errors.invalid_value("tool_choice", "it is only allowed together with 'tools'")
    return ToolUse()


def _function(param: str, tool: object) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping):
        raise request_errors.invalid_type(param, "an object", tool)
    kind = tool.get("type")
    if kind is None:
        raise missing_parameter(f"{param}.type")
    if kind != "function":
        raise request_errors.unsupported_value(f"{param}.type", "only tools of type 'function' are available")
    function = tool.get("function")
    if function is None:
        raise missing_parameter(f"{param}.function")
    if not isinstance(function, Mapping):
        raise request_errors.invalid_type(f"{param}.function", "an object", function)
    _check_function(f"{param}.function", function)
    return function


def _check_function(param: str, function: Mapping[str, object]) -> None:
    name = function.get("name")
    if name is None:
        raise missing_parameter(f"{param}.name")
    if not isinstance(name, str):
        raise request_errors.invalid_type(f"{param}.name", "a string", name)
    if not 0 < len(name) <= MAX_NAME_CHARS or not _NAME_CHARACTERS.issuperset(name):
        reason = f"expected 1 to {MAX_NAME_CHARS} letters, digits, underscores and hyphens"
        raise request_errors.invalid_value(f"{param}.name", reason)
    for key, type_, expected in (
        ("description", str, "a string"), ("parameters", Mapping, "an object"), ("strict", bool, "a boolean"),
    ):  # fmt: skip
        value = function.get(key)
        if value is not None and not isinstance(value, type_):
            raise request_errors.invalid_type(f"{param}.{key}", expected, value)


def _schema(parameters: Mapping[str, object] | None) -> Mapping[str, Any]:
    return {"type": "object", **(parameters or {})}


def _choice(choice: object, names: Sequence[str]) -> tuple[ToolMode, str, frozenset[str]]:
    """The mode, the chosen function, and the functions that may be called."""
    everyone = frozenset(names)
    if choice is None:
        return ToolMode.AUTO, "", everyone
    if choice in TOOL_CHOICES:
        return ToolMode(choice), "", everyone
    if isinstance(choice, str):
        raise request_errors.invalid_value("tool_choice", f"expected one of {', '.join(TOOL_CHOICES)}, or an object")
    if not isinstance(choice, Mapping):
        raise request_errors.invalid_type("tool_choice", "a string or an object", choice)
    if choice.get("type") == "allowed_tools":
        return _allowed_tools(choice.get("allowed_tools"), everyone)
    if choice.get("type") != "function":
        raise request_errors.unsupported_value("tool_choice.type", "only a function can be chosen")
    name = _chosen_name("tool_choice", choice, everyone)
    return ToolMode.NAMED, name, everyone


def _allowed_tools(allowed: object, names: frozenset[str]) -> tuple[ToolMode, str, frozenset[str]]:
    param = "tool_choice.allowed_tools"
    if not isinstance(allowed, Mapping):
        raise request_errors.invalid_type(param, "an object", allowed)
    mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise request_errors.invalid_value(f"{param}.mode", "expected 'auto' or 'required'")
    if not isinstance(tools, list | tuple) or not tools:
        raise request_errors.invalid_type(f"{param}.tools", "an array of tools", tools)
    chosen = [_chosen_name(f"{param}.tools[{index}]", tool, names) for index, tool in enumerate(tools)]
    return ToolMode(mode), "", frozenset(chosen)


def _chosen_name(param: str, value: object, names: frozenset[str]) -> str:
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise missing_parameter(f"{param}.function.name")
    if name not in names:
        raise request_errors.invalid_value(f"{param}.function.name", "there is no such function in 'tools'")
    return str(name)
