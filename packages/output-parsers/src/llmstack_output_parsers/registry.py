"""Parsers by name: those of this package and of installed packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from llmstack_output_parsers.gemma4 import FunctionGemmaToolParser, Gemma4ToolParser
from llmstack_output_parsers.harmony import HarmonyReasoningParser, HarmonyToolParser
from llmstack_output_parsers.json_formats import (
    HermesToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
    XlamToolParser,
)
from llmstack_output_parsers.marked_json import (
    DeepSeekV3ToolParser,
    DeepSeekV31ToolParser,
    Granite20bToolParser,
    GraniteToolParser,
    HunyuanToolParser,
    InklingToolParser,
    InternLMToolParser,
    KimiK2ToolParser,
    LongCatToolParser,
    MiniMaxToolParser,
    Phi4MiniToolParser,
)
from llmstack_output_parsers.minicpm import MiniCPM5ToolParser
from llmstack_output_parsers.minimax_m3 import MiniMaxM3ToolParser
from llmstack_output_parsers.muse import MuseReasoningParser, MuseToolParser
from llmstack_output_parsers.parser import ToolSchemas
from llmstack_output_parsers.plugins import UnknownParserError, check_plugin, load_plugin
from llmstack_output_parsers.protocols import OutputParser
from llmstack_output_parsers.pythonic import Lfm2ToolParser, Olmo3ToolParser, PythonicToolParser
from llmstack_output_parsers.reasoning import (
    DeepSeekR1Parser,
    Ernie45Parser,
    Gemma4Parser,
    GlmParser,
    GraniteParser,
    HunyuanParser,
    InklingParser,
    KeptThinkParser,
    KimiK2Parser,
    MiniMaxM3Parser,
    MistralReasoningParser,
    SeedOssParser,
    ThinkParser,
)
from llmstack_output_parsers.tagged_formats import (
    DeepSeekV4ToolParser,
    DeepSeekV32ToolParser,
    DotsToolParser,
    GlmToolParser,
    HunyuanV3ToolParser,
    MiMoToolParser,
    MiniMaxM2ToolParser,
    Qwen3CoderToolParser,
    SeedOssToolParser,
    Step3ToolParser,
)

TOOL_GROUP, REASONING_GROUP = "llmstack.tool_parsers", "llmstack.reasoning_parsers"


class ToolParserFactory(Protocol):
    """A maker of tool-call parsers, one for each message; usually a class."""

    @property
    def kept_tokens(self) -> Sequence[str]:
        """Special tokens that the parser has to see in the text."""
        ...

    def __call__(self, tools: ToolSchemas) -> OutputParser:
        """A parser for a message that may call `tools`."""
        ...


class ReasoningParserFactory(Protocol):
    """A maker of reasoning parsers, one for each message; usually a class.

    `start` and `end` are the tags. The end of a prompt shows whether it has opened or closed one.
    """

    @property
    def kept_tokens(self) -> Sequence[str]:
        """Special tokens that the parser has to see in the text."""
        ...

    @property
    def start(self) -> str:
        """The tag before the reasoning."""
        ...

    @property
    def end(self) -> str:
        """The tag after the reasoning."""
        ...

    def __call__(self, *, is_open: bool | None) -> OutputParser:
        """A parser for a message whose prompt has opened the tag, has closed it again (False), or neither (None)."""
        ...


Factory = TypeVar("Factory")

TOOL_PARSERS: Mapping[str, ToolParserFactory] = {
    "deepseek_v3": DeepSeekV3ToolParser,
    "deepseek_v31": DeepSeekV31ToolParser,
    "deepseek_v32": DeepSeekV32ToolParser,
    "deepseek_v4": DeepSeekV4ToolParser,
    "dots": DotsToolParser,
    "ernie45": HermesToolParser,
    "functiongemma": FunctionGemmaToolParser,
    "gemma4": Gemma4ToolParser,
    "glm45": GlmToolParser,
    "glm47": GlmToolParser,
    "granite": GraniteToolParser,
    "granite-20b-fc": Granite20bToolParser,
    "granite4": HermesToolParser,
    "hermes": HermesToolParser,
    "hunyuan": HunyuanToolParser,
    "hunyuan_a13b": HunyuanToolParser,
    "hy_v3": HunyuanV3ToolParser,
    "inkling": InklingToolParser,
    "internlm": InternLMToolParser,
    "jamba": HunyuanToolParser,
    "kimi_k2": KimiK2ToolParser,
    "lfm2": Lfm2ToolParser,
    "ling3": GlmToolParser,
    "llama3_json": Llama3JsonToolParser,
    "llama4_json": Llama3JsonToolParser,
    "llama4_pythonic": PythonicToolParser,
    "longcat": LongCatToolParser,
    "mimo": MiMoToolParser,
    "minicpm5": MiniCPM5ToolParser,
    "minimax": MiniMaxToolParser,
    "minimax_m2": MiniMaxM2ToolParser,
    "minimax_m3": MiniMaxM3ToolParser,
    "mistral": MistralToolParser,
    "muse_glimmer": MuseToolParser,
    "olmo3": Olmo3ToolParser,
    "openai": HarmonyToolParser,
    "phi4_mini": Phi4MiniToolParser,
    "phi4_mini_json": Phi4MiniToolParser,
    "poolside_v1": GlmToolParser,
    "pythonic": PythonicToolParser,
    "qwen3": HermesToolParser,
    "qwen3_coder": Qwen3CoderToolParser,
    "qwen3_xml": Qwen3CoderToolParser,
    "seed_oss": SeedOssToolParser,
    "step3": Step3ToolParser,
    "step3p5": Qwen3CoderToolParser,
    "xlam": XlamToolParser,
}
REASONING_PARSERS: Mapping[str, ReasoningParserFactory] = {
    "deepseek_r1": DeepSeekR1Parser,
    "deepseek_v3": ThinkParser,
    "deepseek_v31": ThinkParser,
    "deepseek_v4": ThinkParser,
    "ernie45": Ernie45Parser,
    "gemma4": Gemma4Parser,
    "glm45": GlmParser,
    "glm47": GlmParser,
    "granite": GraniteParser,
    "hunyuan": HunyuanParser,
    "hunyuan_a13b": HunyuanParser,
    "hy_v3": ThinkParser,
    "inkling": InklingParser,
    "kimi_k2": KimiK2Parser,
    "ling3": GlmParser,
    "mimo": ThinkParser,
    "minimax_m2": DeepSeekR1Parser,
    "minimax_m2_append_think": KeptThinkParser,
    "minimax_m3": MiniMaxM3Parser,
    "mistral": MistralReasoningParser,
    "muse_glimmer": MuseReasoningParser,
    "nano_v3": DeepSeekR1Parser,
    "nemotron_v3": ThinkParser,
    "olmo3": ThinkParser,
    "openai": HarmonyReasoningParser,
    "openai_gptoss": HarmonyReasoningParser,
    "poolside_v1": ThinkParser,
    "qwen3": ThinkParser,
    "seed_oss": SeedOssParser,
    "step3": DeepSeekR1Parser,
    "step3p5": DeepSeekR1Parser,
    "think": ThinkParser,
}


def tool_parser(name: str, plugin: str | None = None) -> ToolParserFactory:
    """The parser of tool calls with that name; `plugin` is used for an unknown name: see `load_plugin`.

    Raises:
        UnknownParserError: There is none.
    """
    return _find(name, plugin, TOOL_PARSERS, TOOL_GROUP)


def reasoning_parser(name: str, plugin: str | None = None) -> ReasoningParserFactory:
    """The parser of reasoning with that name; `plugin` as in `tool_parser`."""
    return _find(name, plugin, REASONING_PARSERS, REASONING_GROUP)


def check_parser(name: str, plugin: str | None, *, is_reasoning: bool) -> None:
    """Refuses a name that no parser has, or a plug-in that cannot work; nothing of the plug-in is executed.

    A name of this package needs no plug-in, so none is looked for.

    Raises:
        UnknownParserError: There is no such parser.
    """
    ours = REASONING_PARSERS if is_reasoning else TOOL_PARSERS
    if name in ours:
        return
    if plugin is not None:
        check_plugin(plugin)
    else:
        _find(name, None, ours, REASONING_GROUP if is_reasoning else TOOL_GROUP)


def _find(name: str, plugin: str | None, ours: Mapping[str, Factory], group: str) -> Factory:
    if name in ours:
        return ours[name]
    found: Factory
    if plugin is not None:
        found = load_plugin(plugin, name)
        return found
    from importlib.metadata import entry_points  # late: it takes a third of the time of a command line

    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name not in installed:
        raise UnknownParserError(f"there is no parser '{name[:64]}'{_advice(name, sorted({*ours, *installed}))}")
    found = installed[name].load()
    return found


def _advice(name: str, known: Sequence[str]) -> str:
    """The nearest names; a list of all is longer than a line."""
    import difflib  # late: only a wrong name needs it

    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    nearest = nearest or [one for one in known if one.startswith(name[:3])][:3]
    return (
        f"; did you mean {' or '.join(nearest)}?"
        if nearest
        else f"; the README of llmstack-output-parsers lists all {len(known)}"
    )
