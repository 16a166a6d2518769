"""One call in every format, for tests: what a model writes to call a function."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from xml.sax.saxutils import escape

NAME = "get_weather"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {NAME: SCHEMA, "now": {}}
_DSML, _MM = "｜DSML｜", "]<]minimax[>["


def _json(city: str) -> str:
    return json.dumps({"city": city, "days": 3})


def _object(city: str, arguments: str = "arguments") -> str:
    return f'{{"name": "{NAME}", "{arguments}": {_json(city)}}}'


def _python(city: str) -> str:
    return f"{NAME}(city={city!r}, days=3)"


def _equals(city: str, end: str = "\n") -> str:
    """The function between the tags of Qwen 3 Coder; `end`: the line end beside a value."""
    return (
        f"<function={NAME}>\n<parameter=city>{end}{city}{end}</parameter>\n"
        f"<parameter=days>{end}3{end}</parameter>\n</function>"
    )


def _quoted(city: str, prefix: str = "", name: str = NAME, kind: str = "") -> str:
    """The function between tags with quoted names; `kind`: Texts after the name of a string."""
    other = ' string="false"' if kind or prefix == _DSML else ""
    return (
        f'<{prefix}invoke name="{name}">\n<{prefix}parameter name="city"{kind}>{city}</{prefix}parameter>\n'
        f'<{prefix}parameter name="days"{other}>3</{prefix}parameter>\n</{prefix}invoke>'
    )


def _glm(city: str, line_end: str = "", separator: str = "") -> str:
    return line_end.join(
        (
            f"<tool_call>{NAME}{separator}",
            "<arg_key>city</arg_key>",
            f"<arg_value>{city}</arg_value>",
            "<arg_key>days</arg_key>",
            "<arg_value>3</arg_value>",
            "</tool_call>",
        )
    )


def _hermes(city: str) -> str:
    return f"<tool_call>\n{_object(city)}\n</tool_call>"


def _tool_calls(city: str) -> str:
    return f"<tool_calls>\n[{_object(city)}]\n</tool_calls>"


def _qwen3_coder(city: str) -> str:
    return f"<tool_call>\n{_equals(city)}\n</tool_call>"


def _minimax_m3(city: str) -> str:
    return (
        f'{_MM}<tool_call>\n{_MM}<invoke name="{NAME}">\n{_MM}<city>{city}{_MM}</city>\n'
        f"{_MM}<days>3{_MM}</days>\n{_MM}</invoke>\n{_MM}</tool_call>"
    )


def _llama3_json(city: str) -> str:
    return f"<|python_tag|>{_object(city, 'parameters')}"


def _phi4_mini(city: str) -> str:
    return f"functools[{_object(city)}]"


def _pythonic(city: str) -> str:
    return f"<|python_start|>[{_python(city)}]<|python_end|>"


EXAMPLE_CALLS: Mapping[str, Callable[[str], str]] = {
    "deepseek_v3": lambda city: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{_json(city)}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": lambda city: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{_json(city)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": lambda city: (
        f"<{_DSML}function_calls>\n" + _quoted(city, _DSML, kind=' string="true"') + f"\n</{_DSML}function_calls>"
    ),
    "deepseek_v4": lambda city: f"<{_DSML}tool_calls>\n{_quoted(city, _DSML)}\n</{_DSML}tool_calls>",
    "dots": lambda city: f"<dots_function_call>\n{_quoted(city)}\n</dots_function_call>",
    "ernie45": _hermes,
    "functiongemma": lambda city: (
        f"<start_function_call>call:{NAME}{{city:<escape>{city}<escape>,days:3}}<end_function_call>"
    ),
    "gemma4": lambda city: f'<|tool_call>call:{NAME}{{city:<|"|>{city}<|"|>,days:3}}<tool_call|>',
    "glm45": lambda city: _glm(city, "\n"),
    "glm47": _glm,
    "granite": lambda city: f"<|tool_call|> [{_object(city)}]",
    "granite-20b-fc": lambda city: f"<function_call> {_object(city)}",
    "granite4": _hermes,
    "hermes": _hermes,
    "hunyuan": _tool_calls,
    "hunyuan_a13b": _tool_calls,
    "hy_v3": lambda city: f"<tool_calls>{_glm(city, separator='<tool_sep>')}</tool_calls>",
    "inkling": lambda city: f"<|content_invoke_tool_json|>{_object(city, 'args')}<|end_message|>",
    "internlm": lambda city: f"<|action_start|><|plugin|>\n{_object(city, 'parameters')}<|action_end|>",
    "jamba": _tool_calls,
    "kimi_k2": lambda city: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{_json(city)}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "lfm2": lambda city: f"<|tool_call_start|>[{_python(city)}]<|tool_call_end|>",
    "ling3": _glm,
    "llama3_json": _llama3_json,
    "llama4_json": _llama3_json,
    "llama4_pythonic": _pythonic,
    "longcat": lambda city: f"<longcat_tool_call>{_object(city)}</longcat_tool_call>",
    "mimo": lambda city: f"<tool_call>\n{_equals(city, '')}\n</tool_call>",
    "minicpm5": lambda city: (
        f'<function name="{NAME}"><param name="city">{escape(city)}</param><param name="days">3</param></function>'
    ),
    "minimax": lambda city: f"<tool_calls>\n{_object(city)}\n</tool_calls>",
    "minimax_m2": lambda city: f"<minimax:tool_call>\n{_quoted(city)}\n</minimax:tool_call>",
    "minimax_m3": _minimax_m3,
    "mistral": lambda city: f"[TOOL_CALLS]{NAME}[ARGS]{_json(city)}",
    "muse_glimmer": lambda city: (
        "<atem:function_calls>\n" + _quoted(city, "atem:", f"{NAME}.{NAME}") + "\n</atem:function_calls>"
    ),
    "olmo3": lambda city: f"<function_calls>\n{_python(city)}\n</function_calls>",
    "openai": lambda city: (
        f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{_json(city)}<|call|>"
    ),
    "phi4_mini": _phi4_mini,
    "phi4_mini_json": _phi4_mini,
    "poolside_v1": _glm,
    "pythonic": _pythonic,
    "qwen3": _hermes,
    "qwen3_coder": _qwen3_coder,
    "qwen3_xml": _qwen3_coder,
    "seed_oss": lambda city: f"<seed:tool_call>\n{_equals(city, '')}\n</seed:tool_call>",
    "step3": lambda city: (
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        + _quoted(city, "steptml:")
        + "<｜tool_call_end｜><｜tool_calls_end｜>"
    ),
    "step3p5": _qwen3_coder,
    "xlam": lambda city: f"[{_object(city)}]",
}
"""The text of a call of `get_weather` with a city and `days: 3`, by the name of the format."""
