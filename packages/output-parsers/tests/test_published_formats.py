"""Formats of published models: their calls and reasoning, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_output_parsers import REASONING_PARSERS, TOOL_PARSERS, ChainedParser, Parser
from llmstack_output_parsers.reader import MAX_HELD_CHARS
from llmstack_output_parsers.testing import check_output_parser, parse

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"get_weather": SCHEMA, "now": {}}
DSML, MM = "｜DSML｜", "]<]minimax[>["
PARIS: dict[str, Any] = {"city": "Paris, « north »\nor 5 < 7", "days": 3}
CITY = PARIS["city"]
ONE_CALL = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{json.dumps(PARIS)}\n```<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    f"{json.dumps(PARIS)}<｜tool▁call▁end｜>",
    "deepseek_v32": f'<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n'
    f'<{DSML}parameter name="city" string="true">{CITY}</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n',
    "deepseek_v4": f'<{DSML}tool_calls>\n<{DSML}invoke name="get_weather">\n'
    f'<{DSML}parameter name="city">{CITY}</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n',
    "ernie45": f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}\n</tool_call>',
    "functiongemma": f"<start_function_call>call:get_weather{{city:<escape>{CITY}<escape>,days:3}}<end_function_call>",
    "gemma4": f'<|tool_call>call:get_weather{{city:<|"|>{CITY}<|"|>,days:3}}<tool_call|>',
    "glm45": f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "glm47": f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>{CITY}</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    "granite": f'<|tool_call|> [{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}]',
    "granite-20b-fc": f'<function_call> {{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}',
    "jamba": f'<tool_calls>[\n{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}\n]</tool_calls>',
    "longcat": f'<longcat_tool_call>{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}</longcat_tool_call>',
    "minimax": f'<tool_calls>\n{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}\n</tool_calls>',
    "olmo3": f"<function_calls>\nget_weather(city={CITY!r}, days=3)\n</function_calls>",
    "hunyuan": f'<tool_calls>\n[{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}]\n</tool_calls>',
    "hy_v3": f"<tool_calls><tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>{CITY}</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call></tool_calls>",
    "internlm": '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": '
    f"{json.dumps(PARIS)}}}<|action_end|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{json.dumps(PARIS)}<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": f"<|tool_call_start|>[get_weather(city={CITY!r}, days=3)]<|tool_call_end|>",
    "dots": f'<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">{CITY}</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</dots_function_call>',
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">{CITY}</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "inkling": '<|content_invoke_tool_json|>{"name": "get_weather", "args": ' f"{json.dumps(PARIS)}}}<|end_message|>",
    "minimax_m3": f'{MM}<tool_call>\n{MM}<invoke name="get_weather">\n{MM}<city>{CITY}{MM}</city>\n'
    f"{MM}<days>3{MM}</days>\n{MM}</invoke>\n{MM}</tool_call>",
    "minicpm5": f'<function name="get_weather"><param name="city">{CITY}</param><param name="days">3</param>'
    "</function>",
    "muse_glimmer": '<atem:function_calls>\n<atem:invoke name="get_weather.get_weather">\n'
    f'<atem:parameter name="city">{CITY}</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "openai": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{json.dumps(PARIS)}<|call|>",
    "phi4_mini": f'functools[{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}]',
    "qwen3_coder": f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n<function=get_weather>\n<parameter=city>{CITY}</parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    f'<steptml:invoke name="get_weather"><steptml:parameter name="city">{CITY}</steptml:parameter>'
    '<steptml:parameter name="days">3</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    "step3p5": f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
}  # fmt: skip
# A start of a call, and text after it that is no call.
NO_CALLS = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "get_weather {}"),
    "deepseek_v31": ("<｜tool▁call▁begin｜>", "get_weather {}"),
    "deepseek_v32": (f"<{DSML}function_calls>", " nothing"),
    "gemma4": ("<|tool_call>", "call: {}"),
    "glm45": ("<tool_call>", "get weather"),
    "functiongemma": ("<start_function_call>", "call: {}"),
    "granite-20b-fc": ("<function_call>", " nothing"),
    "longcat": ("<longcat_tool_call>", " nothing"),
    "minimax": ("<tool_calls>", "none"),
    "olmo3": ("<function_calls>", "\nunknown()"),
    "granite": ("<tool_call>", " tool"),
    "hunyuan": ("<tool_calls>", "none"),
    "internlm": ("<|action_start|><|plugin|>", " nothing"),
    "kimi_k2": ("<|tool_calls_section_begin|>", " nothing to do"),
    "lfm2": ("<|tool_call_start|>", "[unknown()]"),
    "inkling": ("<|content_invoke_tool_json|>", " nothing"),
    "dots": ("<dots_function_call>", " nothing"),
    "minimax_m2": ("<minimax:tool_call>", " nothing"),
    "minicpm5": ('<function name="', ">nothing"),
    "minimax_m3": (f"{MM}<tool_call>", " nothing"),
    "openai": ("", "a <|mess to=functions.now"),
    "phi4_mini": ("", "functools are useful"),
    "seed_oss": ("<seed:tool_call>", " nothing"),
    "step3": ("<｜tool_calls_begin｜>", " nothing"),
}
REASONED = {
    "deepseek_r1": "why\nnot</think>Yes",
    "deepseek_v3": "<think>why\nnot</think>Yes",
    "ernie45": "why\nnot\n</think>\n\n<response>\nYes\n</response>\n",
    "gemma4": "<|channel>thought\nwhy\nnot<channel|>Yes",
    "glm45": "<think>why\nnot</think>\nYes",
    "granite": "Here is my thought process: why\nnot Here's my response: Yes",
    "hunyuan": "<think>\nwhy\nnot\n</think>\n<answer>\nYes\n</answer>",
    "kimi_k2": "why\nnot</think>Yes",
    "inkling": "<|content_thinking|>why\nnot<|end_message|><|content_text|>Yes<|end_message|>",
    "minimax_m2": "why\nnot\n</think>\n\nYes",
    "minimax_m3": "<mm:think>why\nnot</mm:think>Yes",
    "muse_glimmer": " to=self<|message|>why\nnot<|eom|><|start|>assistant to=user<|message|>Yes<|eot|>",
    "nano_v3": "why\nnot\n</think>\nYes",
    "nemotron_v3": "<think>\nwhy\nnot\n</think>\nYes",
    "olmo3": "<think>why\nnot</think>Yes",
    "openai": "<|channel|>analysis<|message|>why\nnot<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
    "seed_oss": "<seed:think>why\nnot</seed:think>Yes",
    "step3": "why\nnot</think>Yes",
    "step3p5": "why\nnot\n</think>\nYes",
}


def tool_parser_of(name: str) -> Any:
    return TOOL_PARSERS[name](TOOLS)


@pytest.mark.parametrize("name", ONE_CALL)
def test_a_call_of_each_format_comes_out_with_its_values(name: str):
    found = check_output_parser(lambda: tool_parser_of(name), f"Let me see.\n{ONE_CALL[name]}", range(0, 400, 7))
    ((called, arguments),) = found.calls
    assert (called, json.loads(arguments), found.content.strip()) == ("get_weather", PARIS, "Let me see.")


@pytest.mark.parametrize("name", ONE_CALL)
def test_several_calls_follow_each_other(name: str):
    found = parse(tool_parser_of(name), [f"{ONE_CALL[name]}\n{ONE_CALL[name]}"])
    assert [(called, json.loads(arguments)) for called, arguments in found.calls] == [("get_weather", PARIS)] * 2
    assert found.content == ""


@pytest.mark.parametrize("name", NO_CALLS)
def test_text_without_a_call_is_content_and_its_markers_are_not(name: str):
    marker, text = NO_CALLS[name]
    found = check_output_parser(lambda: tool_parser_of(name), f"Well. {marker}{text}")
    assert (found.content, found.calls) == (f"Well. {text}", [])


@pytest.mark.parametrize("name", REASONED)
def test_reasoning_of_each_format_is_separated(name: str):
    found = check_output_parser(lambda: REASONING_PARSERS[name](is_open=None), REASONED[name], range(0, 100, 3))
    assert (found.reasoning.strip(), found.content.strip(), found.calls) == ("why\nnot", "Yes", [])


def test_an_array_at_the_start_is_calls_where_it_names_a_function():
    array = f'[{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}, {{"name": "now", "arguments": {{}}}}]'
    for text in (array, f"\n{array}\n"):
        found = check_output_parser(lambda: tool_parser_of("xlam"), text, range(0, 200, 7))
        assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [
            ("get_weather", PARIS),
            ("now", {}),
        ]
        assert found.content.strip() == ""
    for text in ('[{"name": "Ann", "arguments": {}}]', "[1, 2] and", " [", f"So {array}", ""):
        found = check_output_parser(lambda: tool_parser_of("xlam"), text)
        assert (found.content, found.calls) == (text, [])


def test_calls_of_one_block_follow_each_other_without_separators():
    call = f'{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}'
    blocks = {
        "minimax": f"<tool_calls>\n{call}\n{call}\n</tool_calls>",
        "olmo3": ONE_CALL["olmo3"].replace("\n</", f"\nget_weather(city={CITY!r}, days=3)\n</"),
    }
    for name, text in blocks.items():
        found = check_output_parser(lambda: tool_parser_of(name), text, range(0, 300, 7))  # noqa: B023
        assert [json.loads(arguments) for _, arguments in found.calls] == [PARIS, PARIS]
        assert found.content.strip() == ""


def test_reasoning_that_models_expect_back_stays_in_the_content_with_its_tag():
    make = lambda is_open: REASONING_PARSERS["minimax_m2_append_think"](is_open=is_open)  # noqa: E731
    text = "why\n</think>\n\nYes"
    for is_open, before in ((None, "<think>"), (True, "<think>"), (False, "")):
        found = check_output_parser(lambda: make(is_open), text)  # noqa: B023
        assert (found.content, found.reasoning) == (before + text, "")


@pytest.mark.parametrize("name", ["glm45", "kimi_k2", "muse_glimmer", "openai"])
def test_a_call_that_ends_the_reasoning_is_a_call(name: str):
    text = {
        "glm45": f"<think>hm{ONE_CALL['glm45']}",
        "kimi_k2": f"hm{ONE_CALL['kimi_k2']}",
        "muse_glimmer": " to=self<|message|>hm<|eom|><|start|>assistant to=get_weather.get_weather<|message|>"
        f"{ONE_CALL['muse_glimmer']}<|eom|>",
        "openai": f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{ONE_CALL['openai']}",
    }[name]
    make = lambda: ChainedParser(REASONING_PARSERS[name](is_open=None), tool_parser_of(name))  # noqa: E731
    found = check_output_parser(make, text, range(0, 300, 5))
    assert (found.reasoning, found.content) == ("hm", "")
    assert [(called, json.loads(arguments)) for called, arguments in found.calls] == [("get_weather", PARIS)]


def test_the_ids_of_kimi_are_the_models_own():
    parser = tool_parser_of("kimi_k2")
    [call] = [call for call in parser.feed(ONE_CALL["kimi_k2"]).tool_calls if call.id]
    assert (call.id, call.name) == ("functions.get_weather:0", "get_weather")


def test_values_of_gemma_nest():
    text = '<|tool_call>call:now{a:{b:[<|"|>x<|"|>,1,true,null,word],<|"|>c d<|"|>:{}},e:[]}<tool_call|> Done'
    found = check_output_parser(lambda: tool_parser_of("gemma4"), text, range(0, 90, 4))
    assert json.loads(found.calls[0][1]) == {"a": {"b": ["x", 1, True, None, "word"], "c d": {}}, "e": []}
    assert found.content.strip() == "Done"


def test_values_of_minimax_m3_nest_by_schema_or_name():
    tools = {"f": {"properties": {"tags": {"type": "array", "items": {"type": "integer"}}}}}
    inner = f"{MM}<a>{MM}<b>x{MM}</b> {MM}</a>{MM}<rows>{MM}<item>1{MM}</item>{MM}<item>2{MM}</item>{MM}</rows>"
    text = f'{MM}<invoke name="f">{inner}{MM}<tags>{MM}<t>1{MM}</t>{MM}<t>2{MM}</t>{MM}</tags>{MM}</invoke> Done'
    found = check_output_parser(lambda: TOOL_PARSERS["minimax_m3"](tools), text, range(0, 300, 7))
    assert json.loads(found.calls[0][1]) == {"a": {"b": "x"}, "rows": ["1", "2"], "tags": [1, 2]}
    assert found.content.strip() == "Done"


def test_values_of_mimo_are_texts_with_their_line_ends():
    text = "<tool_call><function=now><parameter=n>\n5\n</parameter></function></tool_call>"
    assert json.loads(parse(tool_parser_of("mimo"), [text]).calls[0][1]) == {"n": "\n5\n"}


def test_harmony_without_reasoning_or_tools_leaves_the_answer():
    text = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>"
    assert parse(REASONING_PARSERS["openai"](is_open=None), [text]).content == "I look.Yes"
    assert parse(tool_parser_of("openai"), [text]).content == "I look.Yes"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("space", ["", " "])
def test_a_recipient_of_harmony_may_stand_before_the_channel(size: int, space: str):
    text = f'{space}to=functions.now<|channel|>commentary json<|message|>{{"a": 1}}<|call|>'
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    found = parse(tool_parser_of("openai"), pieces)
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [("now", {"a": 1})]
    assert found.content == ""
    chained = ChainedParser(REASONING_PARSERS["openai"](is_open=None), tool_parser_of("openai"))
    behind = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant {text.strip()}"
    parsed = parse(chained, [behind])
    assert (parsed.reasoning, [name for name, _ in parsed.calls]) == ("hm", ["now"])


def test_text_of_harmony_that_only_resembles_a_recipient_is_content():
    for text in (" to=functi", "to=functions.now and then", " to be"):
        assert parse(tool_parser_of("openai"), [text]).content.strip() == text.strip()
        assert parse(REASONING_PARSERS["openai"](is_open=None), [text]).content.strip() == text.strip()


def pieces_of_formats() -> st.SearchStrategy[tuple[str, str]]:
    """A format, and a text of pieces of its calls amid other characters."""

    def texts(name: str) -> st.SearchStrategy[tuple[str, str]]:
        whole = ONE_CALL[name] + REASONED.get(name, "")
        piece = st.builds(
            lambda start, size: whole[start : start + size], st.integers(0, len(whole)), st.integers(1, 60)
        )
        other = st.text(st.sampled_from("ab <>[]{}|\"'\\,:=/\n1."), max_size=5)
        parts = st.lists(st.one_of(piece, piece, other, st.just(whole)), max_size=8)
        return parts.map(lambda found: (name, "".join(found)))

    return st.sampled_from(sorted(ONE_CALL)).flatmap(texts)


def check_any_cut(found: tuple[str, str], places: list[int]) -> None:
    name, text = found
    check_output_parser(lambda: tool_parser_of(name), text, places)
    if name in REASONING_PARSERS:
        check_output_parser(lambda: REASONING_PARSERS[name](is_open=None), text, places)
        chained = lambda: ChainedParser(REASONING_PARSERS[name](is_open=True), tool_parser_of(name))  # noqa: E731
        check_output_parser(chained, text, places)


@given(found=pieces_of_formats(), places=st.lists(st.integers(0, 300), max_size=12))
@settings(max_examples=150, deadline=None)
def test_however_a_text_is_cut_the_same_comes_of_it(found: tuple[str, str], places: list[int]):
    check_any_cut(found, places)


@pytest.mark.full
@given(found=pieces_of_formats(), places=st.lists(st.integers(0, 300), max_size=12))
@settings(max_examples=3000, deadline=None)
def test_however_many_texts_are_cut_the_same_comes_of_them(found: tuple[str, str], places: list[int]):
    check_any_cut(found, places)


@pytest.mark.parametrize("name", ONE_CALL)
def test_hard_texts_are_held_up_to_a_bound_and_visited_a_bounded_number_of_times(name: str):
    start = ONE_CALL[name].partition("Paris")[0]
    for text in ("<" * 4000, start * 40, start + "<x" * 3000, start + "\n" * 3000):
        parser = tool_parser_of(name)
        assert isinstance(parser, Parser)
        for index in range(0, len(text), 5):
            parser.feed(text[index : index + 5])
        assert parser.reader.num_visited <= 200 * len(text)
        assert parser.num_held_chars <= MAX_HELD_CHARS + 512
