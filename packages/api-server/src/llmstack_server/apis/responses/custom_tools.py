"""Custom tools, whose calls have one text in place of arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from llmstack_llm import request_errors
from llmstack_server.chat.turns import required_text
from llmstack_types.json_values import JSONValue

INPUT = "input"
"""The argument in which a model writes the text of a call."""
SYNTAXES = ("lark", "regex")
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")


def custom_function(param: str, tool: Mapping[str, object]) -> dict[str, object]:
    """A custom tool as a function of one text, in the form of chat completions.

    A regular expression is the pattern of the text; a lark grammar is part of the description.

    Raises:
        InvalidRequestError: The tool has no name, or a format that is not known.
    """
    name = required_text(param, tool, "name")
    description = "" if tool.get("description") is None else required_text(param, tool, "description")
    syntax, definition = _format(f"{param}.format", tool.get("format"))
    text: dict[str, object] = {"type": "string"}
    if syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    if syntax == "lark":
        description = f"{description}\nThe text of '{INPUT}' follows this Lark grammar:\n{definition}".strip()
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    function: dict[str, object] = {"name": name, "parameters": schema}
    if description:
        function["description"] = description
    if syntax == "regex":
        function["strict"] = True
    return {"type": "function", "function": function}


def custom_names(tools: Sequence[Mapping[str, JSONValue]] | None) -> frozenset[str]:
    """The names of the custom tools among the tools of a request, which are checked."""
    return frozenset(tool["name"] for tool in tools or () if tool.get("type") == "custom")


def demanded_grammar(
    tools: Sequence[Mapping[str, object]] | None,
    choice: object,
    functions: Sequence[Mapping[str, JSONValue]],
    *,
    is_strict: bool,
) -> tuple[str, str] | None:
    """The one tool that the answer has to call, and its lark grammar; None where there is no such grammar.

    `choice`: The choice, in the form of chat completions.
    `functions`: The tools that may be called, in that form.
    `is_strict`: Whether calls that the model chooses to make follow the schemas of strict functions.

    Raises:
        InvalidRequestError: A format cannot hold, since the model may call other tools, or none.
    """
    names = {name for function in functions if isinstance(name := function["function"]["name"], str)}
    if isinstance(choice, Mapping):
        names &= {choice["function"]["name"]}
    is_demanded = isinstance(choice, Mapping) or choice == "required"
    for index, tool in enumerate(tools or ()):
        if choice == "none" or tool.get("type") != "custom" or tool["name"] not in names:
            continue
        syntax, definition = _format(f"tools[{index}].format", tool.get("format"))
        if syntax == "lark" and is_demanded and len(names) == 1:
            return tool["name"], definition
        if syntax == "lark" or (syntax == "regex" and not (is_demanded or is_strict)):
            reason = (
                "a lark grammar holds only where 'tool_choice' demands the call of this one tool"
                if syntax == "lark"
                else "with this model's tool parser a pattern holds only where 'tool_choice' demands a call"
            )
            raise request_errors.unsupported_value(f"tools[{index}].format.syntax", reason)
    return None


def input_of(arguments: str) -> str:
    """The text of a call from its arguments as the model wrote them, which may be cut anywhere."""
    for end in ("", "}", '"}'):
        try:
            found = json.loads(_CUT_ESCAPE.sub("", arguments) + end if end else arguments)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and isinstance(found.get(INPUT), str):
            return str(found[INPUT].encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return "" if f'{{"{INPUT}":"'.startswith("".join(arguments.split())) else arguments


def _format(param: str, value: object) -> tuple[str, str]:
    """The syntax, `text` for none, and the definition."""
    if value is None:
        return "text", ""
    if not isinstance(value, Mapping):
        raise request_errors.invalid_type(param, "an object", value)
    kind = value.get("type")
    if kind == "text":
        return "text", ""
    if kind != "grammar":
        raise request_errors.invalid_value(f"{param}.type", "expected 'text' or 'grammar'")
    if value.get("syntax") not in SYNTAXES:
        raise request_errors.invalid_value(f"{param}.syntax", f"expected one of {', '.join(SYNTAXES)}")
    return value["syntax"], required_text(param, value, "definition")
