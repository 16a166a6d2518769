"""Tools, the choice among them and the output format, as in chat completions."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_llm import request_errors
from llmstack_server.web.errors import missing_parameter
from llmstack_types import StructuredOutputsParams

_MODES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: Sequence[dict[str, object]] | None) -> list[dict[str, object]]:
    """The functions in the form of chat completions.

    Raises:
        InvalidRequestError: A tool is one that Anthropic hosts, or has no name or schema.
    """
    return [_chat_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools or ())]


def _chat_tool(param: str, tool: dict[str, object]) -> dict[str, object]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        reason = f"only tools of your own are available, not '{request_errors.echo(kind)}'"
        raise request_errors.unsupported_value(f"{param}.type", reason)
    for name in ("name", "input_schema"):
        if tool.get(name) is None:
            raise missing_parameter(f"{param}.{name}")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def chat_tool_choice(choice: dict[str, object] | None) -> tuple[object, bool]:
    """The choice in the form of chat completions, and whether parallel calls are allowed.

    Raises:
        InvalidRequestError: The choice has an unknown form.
    """
    if choice is None:
        return None, True
    is_single = choice.get("disable_parallel_tool_use") is True
    kind = choice.get("type")
    if kind == "tool":
        name = choice.get("name")
        if not isinstance(name, str):
            raise missing_parameter("tool_choice.name")
        return {"type": "function", "function": {"name": name}}, not is_single
    if not isinstance(kind, str) or kind not in _MODES:
        raise request_errors.invalid_value("tool_choice.type", "expected 'auto', 'any', 'tool' or 'none'")
    return _MODES[kind], not is_single


def structured_outputs(output_format: dict[str, object] | None) -> StructuredOutputsParams | None:
    """`output_config.format` as a constraint; None for plain text.

    Raises:
        InvalidRequestError: The format is not `json_schema`.
    """
    if output_format is None:
        return None
    if output_format.get("type") != "json_schema":
        raise request_errors.invalid_value("output_config.format.type", "expected 'json_schema'")
    schema = output_format.get("schema")
    if not isinstance(schema, dict):
        raise request_errors.invalid_type("output_config.format.schema", "an object", schema)
    return StructuredOutputsParams(json=schema)


def template_kwargs(thinking: dict[str, object] | None) -> dict[str, object]:
    """The arguments for templates of reasoning models that `thinking` sets.

    Raises:
        InvalidRequestError: The object has an unknown form.
    """
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive", "between_tools"):
        raise request_errors.invalid_value("thinking.type", "expected 'enabled', 'disabled' or 'adaptive'")
    budget = thinking.get("budget_tokens")
    if budget is not None and type(budget) is not int:
        raise request_errors.invalid_type("thinking.budget_tokens", "an integer", budget)
    return {"enable_thinking": kind == "enabled"} if kind in ("enabled", "disabled") else {}


def thinking_budget(thinking: dict[str, object] | None) -> object:
    """The most tokens of reasoning, unchecked; None where `thinking` sets none."""
    return None if thinking is None or thinking.get("type") != "enabled" else thinking.get("budget_tokens")
