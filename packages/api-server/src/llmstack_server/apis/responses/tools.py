"""Tools, tool choice and text format, in the form of chat completions."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_llm import request_errors
from llmstack_server.apis.responses.custom_tools import custom_function
from llmstack_server.chat.tools import TOOL_CHOICES
from llmstack_server.web.errors import missing_parameter
from llmstack_types import StructuredOutputsParams
from llmstack_types.json_values import JSONObject


def chat_tools(tools: Sequence[dict[str, object]] | None) -> list[dict[str, object]]:
    """The functions in the form of chat completions.

    Raises:
        InvalidRequestError: A tool is one that OpenAI hosts, or has no name.
    """
    return [_chat_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools or ())]


def _chat_tool(param: str, tool: dict[str, object]) -> dict[str, object]:
    kind = tool.get("type")
    if kind is None:
        raise missing_parameter(f"{param}.type")
    if kind == "custom":
        return custom_function(param, tool)
    if kind != "function":
        reason = f"only tools of the types 'function' and 'custom' are available, not '{request_errors.echo(kind)}'"
        raise request_errors.unsupported_value(f"{param}.type", reason)
    if tool.get("name") is None:
        raise missing_parameter(f"{param}.name")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def chat_tool_choice(choice: object, tools: Sequence[dict[str, object]]) -> tuple[object, list[dict[str, object]]]:
    """The choice in the form of chat completions, and the `tools` that may be called.

    Raises:
        InvalidRequestError: The choice has an unknown form, or names unknown tools.
    """
    if choice is None or choice in TOOL_CHOICES:
        return choice, list(tools)
    if isinstance(choice, str):
        raise request_errors.invalid_value("tool_choice", f"expected one of {', '.join(TOOL_CHOICES)}, or an object")
    if not isinstance(choice, dict):
        raise request_errors.invalid_type("tool_choice", "a string or an object", choice)
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": _name("tool_choice", choice)}}, list(tools)
    if kind == "allowed_tools":
        return _allowed_tools(choice, tools)
    reason = f"only functions and custom tools can be chosen, not '{request_errors.echo(kind)}'"
    raise request_errors.unsupported_value("tool_choice.type", reason)


def _allowed_tools(choice: dict[str, object], tools: Sequence[JSONObject]) -> tuple[str, list[JSONObject]]:
    mode, allowed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise request_errors.invalid_value("tool_choice.mode", "expected 'auto' or 'required'")
    if not isinstance(allowed, list):
        raise request_errors.invalid_type("tool_choice.tools", "an array", allowed)
    names = {_name(f"tool_choice.tools[{index}]", tool) for index, tool in enumerate(allowed)}
    unknown = sorted(names - {tool["function"]["name"] for tool in tools})
    if unknown:
        reason = f"the function '{request_errors.echo(unknown[0])}' is not in 'tools'"
        raise request_errors.invalid_value("tool_choice.tools", reason)
    return mode, [tool for tool in tools if tool["function"]["name"] in names]


def _name(param: str, value: object) -> str:
    if not isinstance(value, dict):
        raise request_errors.invalid_type(param, "an object", value)
    name = value.get("name")
    if not isinstance(name, str):
        raise request_errors.invalid_type(f"{param}.name", "a string", name)
    return name


def structured_outputs(text_format: JSONObject | None) -> StructuredOutputsParams | None:
    """The constraint; None for plain text. A schema holds whether or not it is `strict`.

    Raises:
        InvalidRequestError: The format is unknown.
    """
    if text_format is None:
        return None
    kind = text_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise request_errors.invalid_value("text.format.type", "expected 'text', 'json_schema' or 'json_object'")
    if not isinstance(text_format.get("name"), str):
        raise missing_parameter("text.format.name")
    schema = text_format.get("schema")
    if schema is None:
        raise missing_parameter("text.format.schema")
    if not isinstance(schema, dict):
        raise request_errors.invalid_type("text.format.schema", "an object", schema)
    return StructuredOutputsParams(json=schema)
