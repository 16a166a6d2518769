"""Scripts of the chat page in Node.js: markdown, chats, requests and streams, without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_server.app import chat_page

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")

# Evaluates each line, a JSON string with an expression, and prints its value or its error as JSON.
LOOP = """
const answered = (text) => {
  try {
    return { value: eval(text) };
  } catch (error) {
    return { error: error.message };
  }
};
require("readline").createInterface({ input: process.stdin }).on("line", (line) => {
  console.log(JSON.stringify(answered(JSON.parse(line))));
});
"""
BLOCKS = {"p", "h3", "ul", "ol", "li", "blockquote", "pre", "code", "table", "thead", "tbody", "tr", "th", "td", "hr"}
ALLOWED = BLOCKS | {"strong", "em", "del", "a", "span"}
SPECIAL = [
    *list("*_~`#>-+|[]()<>!$\\\n\n 1.:\"'&/"),
    "http://a.b",
    "javascript:",
    "<script>",
    "<img src=x>",
    "```",
    "word",
]


class Scripts:
    """A Node.js with some scripts of the page."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, expression: str, *values: object) -> Any:
        """The value of an expression, in which `$0` and so on are the values."""
        for index, value in enumerate(values):
            expression = expression.replace(f"${index}", f"({json.dumps(value)})", 1)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(expression) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer.get("value")


@contextmanager
def started(*names: str) -> Iterator[Scripts]:
    script = "".join(chat_page._read(name) for name in names) + LOOP
    pipe = subprocess.PIPE
    with subprocess.Popen(["node", "-e", script], stdin=pipe, stdout=pipe, encoding="utf-8") as process:
        yield Scripts(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def markdown() -> Iterator[Scripts]:
    with started("inline.js", "markdown.js") as scripts:
        yield scripts


@pytest.fixture(scope="module")
def chats() -> Iterator[Scripts]:
    with started("conversation.js", "stream.js", "files.js") as scripts:
        yield scripts


def html(node: Any) -> str:
    if isinstance(node, str):
        return node
    attributes = "".join(f" {name}={value}" for name, value in (node.get("attributes") or {}).items())
    return f"<{node['name']}{attributes}>{''.join(map(html, node['children']))}</{node['name']}>"


def shown(markdown: Scripts, text: str) -> str:
    return "".join(map(html, markdown("markdownTree($0)", text)))


def walk(nodes: list[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        if not isinstance(node, str):
            yield from walk(node["children"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a **b *c* d** `e`", "<p>a <strong>b <em>c</em> d</strong> <code>e</code></p>"),
        ("***a*** ~~b~~ __c__ _d_", "<p><em><strong>a</strong></em> <del>b</del> <strong>c</strong> <em>d</em></p>"),
        ("snake_case_name 2 * 3 * 4 a~b", "<p>snake_case_name 2 * 3 * 4 a~b</p>"),
        (r"\*not\* `` a ` b ``", "<p>*not* <code>a ` b</code></p>"),
        ("# One\ntwo\n\nThree\n===", "<h3 class=level1>One</h3><p>two</p><h3 class=level1>Three</h3>"),
        ("- a\n  - b\n    - c\n- d", "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>"),
        ("3. a\n4. b\n   - c", "<ol start=3><li>a</li><li>b<ul><li>c</li></ul></li></ol>"),
        ("1. a\n\n   b\n2. c", "<ol><li><p>a</p><p>b</p></li><li><p>c</p></li></ol>"),
        ("- [ ] a\n- [x] b", "<ul><li>☐ a</li><li>☑ b</li></ul>"),
        ("> a\n> > b\nc", "<blockquote><p>a</p><blockquote><p>b\nc</p></blockquote></blockquote>"),
        ("```py\nx = **1**\n```\n- - -", "<pre language=py><code>x = **1**</code></pre><hr></hr>"),
        ("~~~\n```\n~~~", "<pre><code>```</code></pre>"),
        ("```\nit still comes", "<pre><code>it still comes</code></pre>"),
        ("<img src=x onerror=y>", "<p><img src=x onerror=y></p>"),
    ],
)
def test_markdown_becomes_a_tree(markdown: Scripts, text: str, expected: str) -> None:
    assert shown(markdown, text) == expected


def test_a_table_has_its_sides_and_cells(markdown: Scripts) -> None:
    found = shown(markdown, "| a | b |\n|:-:|--:|\n| `x\\|y` | **1** | more\n| only |\nafter")
    head = "<thead><tr><th class=center>a</th><th class=right>b</th></tr></thead>"
    first = "<tr><td class=center><code>x|y</code></td><td class=right><strong>1</strong></td></tr>"
    second = "<tr><td class=center>only</td><td class=right></td></tr>"
    assert found == f"<table>{head}<tbody>{first}{second}</tbody></table><p>after</p>"


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("[t](https://a.b/c_(d) 'x') ![i](http://c.d/e.png)", [("https://a.b/c_(d)", "t"), ("http://c.d/e.png", "i")]),
        (
            "see https://a.b/c, or (https://a.b/d).",
            [("https://a.b/c", "https://a.b/c"), ("https://a.b/d", "https://a.b/d")],
        ),
        ("<https://a.b/>", [("https://a.b/", "https://a.b/")]),
        ("[a](javascript:alert(1)) [b](data:text/html,x) [c](/live) [d](//e.f) [e](ftp://a.b)", []),
        ("[a [b](https://c.d) e](https://f.g)", [("https://c.d/", "b"), ("https://f.g/", "https://f.g")]),
        ("`https://a.b`\n```\nhttps://a.b\n```", []),
    ],
)
def test_links_are_of_the_web_alone(markdown: Scripts, text: str, links: list[tuple[str, str]]) -> None:
    found = [
        node for node in walk(markdown("markdownTree($0)", text)) if not isinstance(node, str) and node["name"] == "a"
    ]
    assert [(one["attributes"]["href"], "".join(one["children"])) for one in found] == links


@pytest.mark.parametrize("formula", ["$a_b*c*d$", "$$x_1 * y_2$$", r"\(a_1 * b_2\)", r"\[\frac{a}{b}\]"])
def test_formulas_stay_text(markdown: Scripts, formula: str) -> None:
    assert shown(markdown, f"so {formula}.") == f"<p>so <span class=math>{formula}</span>.</p>"
    assert shown(markdown, "$5 and $10") == "<p>$5 and $10</p>"


@settings(max_examples=150, deadline=None)
@given(text=st.lists(st.sampled_from(SPECIAL) | st.text(max_size=4), max_size=60).map("".join))
def test_random_markdown_makes_no_element_outside_the_allowed_ones(markdown: Scripts, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    for node in walk(markdown("markdownTree($0)", text)):
        if isinstance(node, str):
            continue
        assert node["name"] in ALLOWED
        assert set(node.get("attributes") or {}) <= {"class", "href", "start", "language"}
        assert (node["name"] == "a") == ("href" in (node.get("attributes") or {}))
        if node["name"] == "a":
            assert node["attributes"]["href"].startswith(("http://", "https://"))


@settings(max_examples=50, deadline=None)
@given(words=st.lists(st.text("abcdefgh ", min_size=1, max_size=8), max_size=20))
def test_no_word_is_lost(markdown: Scripts, words: list[str]) -> None:
    text = "**".join(words) + "\n\n> " + "\n- ".join(words) + "\n```\n" + " ".join(words)
    tree = walk(markdown("markdownTree($0)", text))
    said = " ".join(node for node in tree if isinstance(node, str))
    assert "".join(char for char in said if char.isalpha()) == "".join(char for char in text if char.isalpha())


ODD = ("*a ", "[", "[a](", "**a *b ", ">", "- ", "`a ``", "a|b\n-|-\n", "$a ", "[a](b '")


@pytest.mark.parametrize("part", ODD)
def test_long_odd_texts_end(markdown: Scripts, part: str) -> None:
    assert shown(markdown, part * (20_000 // len(part)))


def chat(*messages: dict[str, Any], **settings: object) -> dict[str, Any]:
    return {"id": "c", "title": "t", "settings": {"mode": "chat", **settings}, "messages": list(messages)}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def model(text: str, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


MODEL = {"id": "m", "max_model_len": 8192, "chat": {"has_system_prompt": True, "default_max_tokens": None}}


def test_a_request_carries_the_conversation_and_the_settings(chats: Scripts) -> None:
    given_chat = chat(
        user("a"), model("b", reasoning="r"), user("c"), system=" Be kind. ", temperature="0", seed="7", logprobs=True
    )
    body = chats("requestBody($0, $1)", given_chat, MODEL)
    roles = [(one["role"], one["content"]) for one in body["messages"]]
    assert roles == [("system", "Be kind."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    assert (body["temperature"], body["seed"], body["top_logprobs"], body["max_tokens"]) == (0, 7, 5, 1024)
    assert "top_p" not in body
    assert "reasoning" not in body["messages"][2]


def test_pictures_go_before_their_text_and_are_exported(chats: Scripts) -> None:
    picture = {"name": "a [cat].png", "url": "data:image/png;base64,AAAA"}
    messages = ({"role": "user", "content": "what?", "pictures": [picture]},
                {"role": "user", "content": "", "pictures": [picture, picture]})  # fmt: skip
    sent = chats("requestBody($0, $1).messages", chat(*messages), MODEL)
    image = {"type": "image_url", "image_url": {"url": picture["url"]}}
    assert [one["content"] for one in sent] == [[image, {"type": "text", "text": "what?"}], [image, image]]
    assert "![a cat.png](data:image/png;base64,AAAA)\n\nwhat?" in chats("exportedMarkdown($0)", chat(*messages))
    assert json.loads(chats("exportedJson($0)", {**chat(*messages), "createdMs": 0}))["messages"][0]["pictures"] == [
        picture
    ]


def test_sounds_go_as_sounds(chats: Scripts) -> None:
    sound = {"name": "hello.wav", "url": "data:audio/x-wav;base64,AAAA"}
    message = {"role": "user", "content": "what?", "pictures": [sound]}
    (sent,) = chats("requestBody($0, $1).messages", chat(message), MODEL)
    assert sent["content"][0] == {"type": "audio_url", "audio_url": {"url": sound["url"]}}
    assert "\n[hello.wav](data:audio/x-wav;base64,AAAA)\n" in chats("exportedMarkdown($0)", chat(message))
    sounds = {"max_items": 3, "max_bytes": 1_500_000}
    assert chats("limitsText($0, $1)", {"sounds": sounds}, [sound]) == "1 of 3 sounds; each at most 1.5 MB"
    file = {"name": "a.x", "type": "image/png", "size": 3}
    assert chats("refusalOf($0, $1)", file, {"sounds": sounds}) == "a.x is no sound that the server reads."
    spoken = {**file, "type": "audio/mpeg"}
    assert chats("refusalOf($0, $1)", spoken, {"sounds": sounds}) is None
    assert chats("refusalOf($0, $1)", {**spoken, "size": 1_600_000}, {"sounds": sounds}) == (
        "a.x has 1.6 MB; 1.5 are the most."
    )


@pytest.mark.parametrize(
    ("kind", "size", "reason"),
    [
        ("image/png", 2_000_000, None),
        ("audio/wav", 10, "a.x is no picture that the server reads."),
        ("image/svg+xml", 10, "a.x is no picture that the server reads."),
        ("", 10, "a.x is no picture that the server reads."),
        ("image/jpeg", 2_500_001, "a.x has 2.5 MB; 2 are the most."),
    ],
)
def test_a_file_is_refused_before_it_is_read(chats: Scripts, kind: str, size: int, reason: str | None) -> None:
    limits = {"pictures": {"max_items": 2, "max_bytes": 2_000_000, "max_pixels": 50_000_000}}
    files = [{"url": "data:image/png;base64,AAAA"}]
    assert chats("refusalOf($0, $1)", {"name": "a.x", "type": kind, "size": size}, limits) == reason
    assert chats("limitsText($0, $1)", limits, files) == "1 of 2 pictures; each at most 2 MB and 50 megapixels"


@pytest.mark.parametrize(
    ("asked", "own", "room", "expected"),
    [("", None, 8192, 1024), ("", None, 512, 256), ("", 40, 8192, None), ("9", 40, 8192, 9), ("9", None, 512, 9)],
)
def test_the_longest_answer_is_asked_for_where_the_model_sets_none(
    chats: Scripts, asked: str, own: int | None, room: int, expected: int | None
) -> None:
    described = {"id": "m", "max_model_len": room, "chat": {"has_system_prompt": True, "default_max_tokens": own}}
    assert chats("requestBody($0, $1)", chat(user("a"), max_tokens=asked), described).get("max_tokens") == expected


def test_a_system_prompt_goes_only_to_a_model_that_reads_one(chats: Scripts) -> None:
    deaf = {**MODEL, "chat": {"has_system_prompt": False, "default_max_tokens": None}}
    assert chats("requestBody($0, $1)", chat(user("a"), system="s"), deaf)["messages"] == [user("a")]


def test_schema_and_tools_are_json(chats: Scripts) -> None:
    tools = '[{"name": "weather"}, {"type": "function", "function": {"name": "time"}}]'
    body = chats("requestBody($0, $1)", chat(user("a"), schema='{"type": "object"}', tools=tools), MODEL)
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert [tool["function"]["name"] for tool in body["tools"]] == ["weather", "time"]
    with pytest.raises(ValueError, match=r"^The JSON schema in the settings is no JSON: "):
        chats("requestBody($0, $1)", chat(user("a"), schema="{"), MODEL)


def test_more_of_an_answer_is_asked_for(chats: Scripts) -> None:
    stopped = chat(user("a"), model("b", note="stopped"))
    body = chats("requestBody($0, $1, true)", stopped, MODEL)
    assert body["messages"][-1] == {"role": "assistant", "content": "b"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert chats("canContinue($0)", stopped) is True
    assert chats("canContinue($0)", chat(user("a"), model("b"))) is False
    text = chat(user("Once "), model("upon", note="stopped"), mode="completion")
    assert chats("requestBody($0, $1, true)", text, MODEL)["prompt"] == "Once upon"


CALL = {"id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}


def test_calls_of_tools_and_their_results_go_back(chats: Scripts) -> None:
    asked = chat(user("a"), model("", toolCalls=[CALL]))
    assert chats("openCalls($0)", asked) == [CALL]
    answered = chat(*asked["messages"], {"role": "tool", "content": "rain", "callId": "call_1"})
    assert chats("openCalls($0)", answered) == []
    messages = chats("requestBody($0, $1)", answered, MODEL)["messages"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert messages[2] == {"role": "tool", "content": "rain", "tool_call_id": "call_1"}


def test_a_chat_is_exported(chats: Scripts) -> None:
    kept = {**chat(user("a"), model("b", toolCalls=[CALL]), system="s"), "title": "Über Füchse!", "createdMs": 0}
    text = chats("exportedMarkdown($0)", kept)
    assert text.startswith("# Über Füchse!\n\n## System prompt\n\ns\n\n## You\n\na\n\n## Model\n\nb\n\n`weather`")
    exported = json.loads(chats("exportedJson($0)", kept))
    assert exported["messages"][1]["tool_calls"][0]["function"]["name"] == "weather"
    assert exported["created"] == "1970-01-01T00:00:00.000Z"
    assert chats("fileName($0)", kept["title"]) == "über-füchse"
    assert chats("titleOf($0)", "\n" + "x" * 80 + "\nsecond") == "x" * 59 + "…"


STREAM = 'id: s.1\ndata: {"a": 1}\n\n: comment\n\nid: s.2\r\ndata: {"b":\r\ndata: 2}\r\n\r\ndata: [DONE]\n\n'
READ = "(() => { const parser = new EventParser(); return $0.flatMap((text) => parser.add(text)); })()"


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_events_are_the_same_however_they_are_cut(chats: Scripts, size: int) -> None:
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert chats(READ, pieces) == [
        {"id": "s.1", "data": '{"a": 1}'},
        {"id": "s.2", "data": '{"b":\n2}'},
        {"id": "s.2", "data": "[DONE]"},
    ]


ADD = """(() => {
  const answer = { role: "assistant", content: "", times: { startMs: 0 } };
  let nowMs = 0;
  for (const chunk of $0) addChunk(answer, chunk, nowMs += 500);
  return { ...answer, facts: factsOf(answer) };
})()"""


def delta(finish: str | None = None, logprobs: Any = None, **fields: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish, "logprobs": logprobs}]}


def test_chunks_become_an_answer_with_reasoning_calls_and_facts(chats: Scripts) -> None:
    answer = chats(ADD, [
        delta(role="assistant", content=""), delta(reasoning="hm", reasoning_content="hm"), delta(content="So"),
        delta(tool_calls=[{"index": 0, "id": "i", "function": {"name": "f", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]), delta(finish="length"),
        {"choices": [], "usage": {"completion_tokens": 4}},
    ])  # fmt: skip
    assert (answer["content"], answer["reasoning"]) == ("So", "hm")
    assert answer["toolCalls"] == [{"id": "i", "name": "f", "arguments": "{}"}]
    assert (
        answer["facts"]
        == "first token after 1000 ms · 4 tokens · 2.0 tokens per second · the longest answer is reached"
    )


def logprobs(*tokens: str) -> dict[str, Any]:
    return {"content": [{"token": token, "logprob": 0.0, "top_logprobs": []} for token in tokens]}


def test_the_token_that_ends_an_answer_is_not_shown(chats: Scripts) -> None:
    ended = chats(ADD, [delta(content="Hi", logprobs=logprobs("Hi")), delta("stop", logprobs("<|im_end|>"))])
    assert [token[0] for token in ended["tokens"]] == ["Hi"]
    cut = chats(ADD, [delta("length", logprobs("Hi"), content="Hi")])
    assert [token[0] for token in cut["tokens"]] == ["Hi"]
    both = chats(ADD, [delta("stop", logprobs("Hi", "</s>"), content="Hi")])
    assert [token[0] for token in both["tokens"]] == ["Hi"]
