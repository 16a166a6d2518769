"""Structured output through the whole stack: valid whatever the schema, the neighbours and the scheduling."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from llmstack_llm import LLM, RequestOutput, SamplingParams
from llmstack_types import InvalidRequestError, StructuredOutputsParams

demo_model = pytest.importorskip("llmstack_demo_model")

CASES_FILE = Path(__file__).parents[1] / "packages" / "structured-output" / "tests" / "schema_cases.json"
SCHEMAS: dict[str, Any] = {name: case["schema"] for name, case in json.loads(CASES_FILE.read_text())["cases"].items()}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy", "sad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
FREE = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24, logprobs=2) for seed in range(4)]
PROMPTS = ["Once upon a time", "The wolf", "She said", "In the forest"]
VARIANTS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preemption": {"num_kv_blocks": 18, "enable_prefix_caching": False},
    "ahead": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
    "small steps": {"max_num_batched_tokens": 9, "max_num_seqs": 6},
    "eager": {"enforce_eager": True},
}


@pytest.fixture(scope="module")
def make_llm() -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(LLM(str(demo_model.model_path()), generation_config="vllm", max_model_len=256, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.llm_engine.shutdown()


def params(seed: int = 0, max_tokens: int = 120, **constraint: Any) -> SamplingParams:
    structured = StructuredOutputsParams(**constraint)
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, structured_outputs=structured)


def generate(llm: LLM, sampling_params: list[SamplingParams]) -> list[RequestOutput]:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(sampling_params))]
    return llm.generate(prompts, sampling_params, use_tqdm=False)


def facts(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def test_all_schemas_in_one_batch_with_free_requests_that_notice_nothing(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    names = [name for name in SCHEMAS for _ in range(3)]
    constrained = [params(seed, json=json.dumps(SCHEMAS[name])) for seed, name in enumerate(names)]
    alone = facts(generate(llm, FREE))
    outputs = generate(llm, [*FREE, *constrained])
    assert facts(outputs[: len(FREE)]) == alone
    finished = [(name, one.outputs[0]) for name, one in zip(names, outputs[len(FREE) :], strict=True)]
    finished = [(name, one) for name, one in finished if one.finish_reason == "stop"]
    for name, one in finished:
        jsonschema.validate(json.loads(one.text), SCHEMAS[name], jsonschema.Draft202012Validator)
    assert len(finished) > len(names) / 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_constrained_texts_do_not_depend_on_the_scheduling(make_llm: Callable[..., LLM], variant: str) -> None:
    llm = make_llm(**VARIANTS[variant])
    constraints: list[dict[str, Any]] = [
        {"json": PERSON},
        {"regex": r"(\d{3}-){3}[a-f]+"},
        {"choice": ["yes", "no", "perhaps not"]},
        {"json_object": True},
        {"grammar": 'root ::= "(" root ")" | [a-c]+'},
        {"json": PERSON, "disable_any_whitespace": True},
    ]
    mixed = [params(seed, 60, **constraint) for seed, constraint in enumerate(constraints * 2)]
    outputs = generate(llm, [*FREE, *mixed])
    assert facts(outputs) == facts(generate(make_llm(), [*FREE, *mixed]))
    for one, constraint in zip(outputs[len(FREE) :], constraints * 2, strict=True):
        check(one.outputs[0].text, one.outputs[0].finish_reason, constraint)


def check(text: str, finish_reason: str | None, constraint: dict[str, Any]) -> None:
    """A text that came to its end is what the constraint describes."""
    if finish_reason != "stop":
        assert finish_reason == "length"
    elif "json" in constraint:
        jsonschema.validate(json.loads(text), constraint["json"])
        if constraint.get("disable_any_whitespace"):
            assert re.fullmatch(r'\{"name":".*","age":\d+,"mood":"\w+"\}', text)
    elif "regex" in constraint:
        assert re.fullmatch(constraint["regex"], text)
    elif "choice" in constraint:
        assert text in constraint["choice"]
    elif "json_object" in constraint:
        assert isinstance(json.loads(text), dict)
    else:
        assert re.fullmatch(r"\(*[a-c]+\)*", text)
        assert text.count("(") == text.count(")")


OTHER_PARAMS: list[dict[str, Any]] = [
    {"min_tokens": 6},
    {"ignore_eos": True},
    {"n": 3},
    {"n": 1, "best_of": 3},
    {"logprobs": 3},
    {"prompt_logprobs": 1},
    {"top_k": 5, "top_p": 0.8},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3, "presence_penalty": 1.0},
    {"logit_bias": {5: 50.0}},
    {"bad_words": ["the"]},
]


def test_every_parameter_of_sampling_goes_with_a_constraint(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    constraint = StructuredOutputsParams(regex="[a-z]{2,30}")
    for others in OTHER_PARAMS:
        made = SamplingParams(**({"max_tokens": 40, "seed": 1} | others), structured_outputs=constraint)
        [output] = llm.generate(["A"], made, use_tqdm=False)
        for one in output.outputs:
            assert re.fullmatch("[a-z]{2,30}", one.text), others
            assert len(one.token_ids) > 6 or "min_tokens" not in others


@pytest.mark.parametrize("others", [{"use_beam_search": True, "n": 2, "temperature": 0.0}, {"allowed_token_ids": [5]}])
def test_what_does_not_go_with_a_constraint_is_refused(make_llm: Callable[..., LLM], others: dict[str, Any]) -> None:
    made = SamplingParams(**others, structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(InvalidRequestError, match="combined"):
        make_llm().generate(["A"], made, use_tqdm=False)


def test_a_constraint_that_does_not_compile_is_refused_offline_too(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generate(make_llm(), [params(json={"type": "objekt"})])
    assert (caught.value.param, caught.value.code) == ("structured_outputs.json", "invalid_json_schema")


FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
MESSAGES: list[Any] = [{"role": "user", "content": "Who are you?"}]
# Fuel does not pay for this one: compiling it takes minutes.
SLOW = {"allOf": [{"type": "string", "pattern": f"(a|b){{{n},}}[^c]*{n}.*"} for n in range(300, 400)]}


def ask(server: Any, **fields: Any) -> tuple[int, Any]:
    body = {"prompt": "A", "max_tokens": 60, "seed": 1} | fields
    status, answer, _ = server.post("/v1/completions", body)
    return status, answer


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": FORMAT, "max_tokens": 150}, r"\{.*\}"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 200}, r"\{.*\}|\{.*"),
        ({"response_format": {"type": "text"}}, ".*"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "[ab]"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"ebnf": 'root ::= "a" | "b"'}, "[ab]"),
        ({"grammar": 'root ::= "a" | "b"'}, "[ab]"),
        ({"json_schema": '{"type": "integer", "minimum": 7, "maximum": 9}'}, "[789]"),
        ({"json_schema": {"enum": ["x"]}}, '"x"'),
        ({"response_format": {"type": "json_object", "schema": {"enum": ["x"]}}}, '"x"'),
        ({"response_format": {"type": "json", "value": {"enum": ["x"]}}}, '"x"'),
        ({"response_format": {"type": "regex", "value": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"guided_json": {"type": "integer", "minimum": 7, "maximum": 9}}, "[789]"),
        (
            {"guided_grammar": 'start: "x"+ "y"', "guided_decoding_backend": "guidance", "max_tokens": 100},
            "x+y|x+",
        ),
        ({"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "hey"}}}, "hey"),
    ],
    ids=str,
)
def test_every_form_of_constraint_is_heeded(demo_server: Any, fields: dict[str, Any], pattern: str) -> None:
    status, answer = ask(demo_server, **fields)
    assert status == 200, answer
    assert re.fullmatch(pattern, answer["choices"][0]["text"], re.DOTALL)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}},
            "response_format.json_schema.schema",
            "invalid_json_schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": [0] * 2000}},
                }
            },
            "response_format.json_schema.schema",
            "schema_too_complex",
        ),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "invalid_regex"),
        ({"structured_outputs": {"regex": "a{5000}"}}, "structured_outputs.regex", "grammar_too_complex"),
        ({"structured_outputs": {"json": SLOW}}, "structured_outputs.json", "schema_too_complex"),
        ({"guided_grammar": 'root ::= "a'}, "guided_grammar", "invalid_grammar"),
        ({"regex": "["}, "regex", "invalid_regex"),
        ({"ebnf": 'root ::= "a'}, "ebnf", "invalid_grammar"),
        ({"json_schema": "{"}, "json_schema", "invalid_json_schema"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "invalid_value"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "objekt"}}},
            "response_format.schema",
            "invalid_json_schema",
        ),
        ({"response_format": {"type": "regex", "value": "["}}, "response_format.value", "invalid_regex"),
        ({"guided_json": "{"}, "guided_json", "invalid_json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex", "invalid_value"),
        ({"response_format": FORMAT, "stream": True, "structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_constraint_that_cannot_be_used_is_a_400_that_names_it(
    demo_server: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    status, answer = ask(demo_server, **fields)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [0], "min_tokens": 2}, "allowed_token_ids"),
        ({"structured_outputs": {"choice": ["yes"]}, "bad_words": ["yes"]}, "bad_words"),
        ({"structured_outputs": {"choice": ["x"]}, "no_repeat_ngram_size": 1, "prompt": "x x"}, None),
        ({"structured_outputs": {"regex": "ax"}, "bad_words": ["x", "ax"]}, None),
    ],
    ids=str,
)
def test_fields_that_leave_no_token_are_a_400_that_counts_as_nothing_else(
    demo_server: Any, fields: dict[str, Any], param: str | None
) -> None:
    before = demo_server.metric("vllm:corrupted_requests_total")
    status, answer = ask(demo_server, **fields)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_value", param), answer
    assert demo_server.metric("vllm:corrupted_requests_total") == before


ADDED_TOKENS = sorted(
    token["content"]
    for token in json.loads((demo_model.model_path() / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
)


@pytest.mark.parametrize("name", ADDED_TOKENS)
def test_a_literal_that_is_an_added_token_is_written_as_it_is(demo_server: Any, name: str) -> None:
    text = f"a{name}b"
    quoted = json.dumps(text)
    for constraint, expected in (
        ({"choice": [text]}, text),
        ({"regex": re.escape(text)}, text),
        ({"grammar": f"root ::= {quoted}"}, text),
        ({"json": {"const": text}}, quoted),
        ({"json": {"enum": [text]}}, quoted),
        ({"json": {"type": "string", "pattern": f"^{re.escape(text)}$"}}, quoted),
        ({"json": {"type": "object", "properties": {text: {"const": 1}}, "required": [text]}}, f"{{{quoted}:1}}"),
    ):
        structured = {**constraint, "disable_any_whitespace": True}
        status, answer = ask(demo_server, structured_outputs=structured, max_tokens=60)
        assert (status, answer["choices"][0]["text"]) == (200, expected), constraint


UNDECLARED = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
MANY_COMMAS = {"14": 100, "356": 100}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNDECLARED}}},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": UNDECLARED}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ],
    ids=["response_format", "tool"],
)
def test_what_a_schema_does_not_declare_is_written_only_by_the_letter(demo_server: Any, fields: dict[str, Any]) -> None:
    def ask_chat(**options: bool) -> str:
        body = {"messages": MESSAGES, "max_tokens": 30, "temperature": 0, "logit_bias": MANY_COMMAS, **fields}
        body["structured_outputs"] = {"disable_any_whitespace": True, **options}
        status, answer, _ = demo_server.post("/v1/chat/completions", body)
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls")
        return str(calls[0]["function"]["arguments"] if calls else message["content"])

    assert json.loads(ask_chat()) == {"a": 1}
    assert ask_chat(disable_additional_properties=False).startswith('{"a":1,')


def test_a_stream_of_a_chat_says_what_the_whole_answer_says(demo_server: Any) -> None:
    client = demo_server.client

    def ask_chat(**fields: Any) -> Any:
        return client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=MESSAGES,
            max_tokens=100,
            seed=3,
            response_format=FORMAT,  # type: ignore[arg-type]  # the client's own typed dictionary
            **fields,
        )

    whole = ask_chat().choices[0]
    chunks = [chunk.choices[0] for chunk in ask_chat(stream=True) if chunk.choices]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content), PERSON)


def test_constrained_and_free_requests_run_beside_each_other(demo_server: Any) -> None:
    client: openai.OpenAI = demo_server.client
    model = client.models.list().data[0].id

    def complete(index: int) -> str:
        extra = {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}} if index % 2 else None
        fields: Any = {"model": model, "prompt": "A", "max_tokens": 80, "seed": index, "extra_body": extra}
        return str(client.completions.create(**fields).choices[0].text)

    free = complete(0)
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(complete, range(16)))
    assert texts[0] == free
    for text in texts[1::2]:
        jsonschema.validate(json.loads(text), PERSON)


def test_an_ambiguous_grammar_ends_its_own_request_and_no_other(demo_server: Any) -> None:
    """Each of its tokens takes longer than the one before: 400 of them held up all others for a minute and a half."""
    free = {"max_tokens": 40, "seed": 1}
    alone = ask(demo_server, **free)
    grammar = 'root ::= e\ne ::= e "+" e | e "*" e | e e | "(" e ")" | [a-z0-9 ] | e "," e | ""'
    slow = {"structured_outputs": {"grammar": grammar}, "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        ambiguous = [pool.submit(ask, demo_server, **slow, seed=seed) for seed in range(2)]
        others = [pool.submit(ask, demo_server, **free) for _ in range(8)]
        for answer in ambiguous:
            status, body = answer.result()
            assert (status, body["error"]["code"]) == (500, "request_quarantined")
            assert body["error"]["message"] == "The output constraint of this request failed."
    texts = [other.result() for other in others]
    assert [(status, body["choices"][0]["text"]) for status, body in texts] == [
        (200, alone[1]["choices"][0]["text"])
    ] * 8


def test_the_flag_forbids_blanks_and_unknown_backends(serve: Callable[..., Any], launch: Callable[..., Any]) -> None:
    with serve("--structured-outputs-config", '{"backend": "auto", "disable_any_whitespace": true}') as server:
        _, answer = ask(server, response_format=FORMAT, max_tokens=80)
        assert re.match(r'\{"name":"[^"]*","age":\d+,"mood":"\w+"\}', answer["choices"][0]["text"])
    refused = launch("--structured-outputs-config", '{"backend": "another"}')
    assert refused.process.wait(30) != 0
    assert "'another' is not available" in refused.log
