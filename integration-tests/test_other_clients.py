"""Other people's clients, unmodified, against a real server: each is installed into an environment of its own."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from client_environments import CLIENTS, Install, output_of, run, with_npm, with_pip, with_pip_and_ours

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]


@pytest.fixture(scope="session")
def model_folder() -> Path:
    from llmstack_demo_model import model_path

    return model_path()


@pytest.fixture
def place(demo_server: Any) -> list[object]:
    """URL and model, as the scripts take them."""
    return [demo_server.url + "/v1", "llmstack-demo"]


def test_openai_for_node(install: Install, place: list[object], tmp_path: Path) -> None:
    folder = install(with_npm, "openai@^7")
    script = shutil.copy(CLIENTS / "openai_node.mjs", folder)  # modules are looked for beside the script
    said = json.loads(output_of(["node", script, *place], tmp_path))
    assert said["models"] == ["llmstack-demo"]
    assert said["whole"]
    assert said["pieces"] == said["streamed"] == said["whole"]
    assert said["streamedUsage"] == said["wholeUsage"] > 12
    assert said["finishReason"] == "length"
    assert "".join(said["textTokens"]) == "".join(said["textChunks"]) == said["text"]
    assert said["numVectors"] == 2
    assert said["numDimensions"] > 0
    assert said["response"].startswith(said["whole"])
    assert said["mistake"] == {
        "status": 400, "param": "n", "code": "integer_above_max_value", "isBadRequest": True,
    }  # fmt: skip


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "look", "parameters": SCHEMA, "strict": True}
HELLO = [{"role": "user", "content": "Hi"}]
# The type of the whole answer, of an event of its stream (none where there is no stream), the route and the body.
EXCHANGES: list[tuple[str, str | None, str, dict[str, Any]]] = [
    ("Chat.ChatCompletion", "Chat.ChatCompletionChunk", "chat/completions",
     {"messages": HELLO, "max_tokens": 5, "n": 2, "logprobs": True, "top_logprobs": 1}),
    ("Chat.ChatCompletion", "Chat.ChatCompletionChunk", "chat/completions",
     {"messages": HELLO, "max_tokens": 400, "seed": 1, "tool_choice": "required",
      "tools": [{"type": "function", "function": FUNCTION}]}),
    ("Completion", None, "completions", {"prompt": ["a", "b"], "max_tokens": 4, "logprobs": 2}),
    ("CreateEmbeddingResponse", None, "embeddings", {"input": ["a fox", "a crow"]}),
    ("Responses.Response", "Responses.ResponseStreamEvent", "responses",
     {"input": "Hi", "max_output_tokens": 16, "top_logprobs": 1, "include": ["message.output_text.logprobs"]}),
    ("Responses.Response", "Responses.ResponseStreamEvent", "responses",
     {"input": "Hi", "max_output_tokens": 400, "tool_choice": "required", "tools": [{"type": "function", **FUNCTION}]}),
]  # fmt: skip
# What we send beyond OpenAI's schema; see test_openai_schema.py.
OUR_KEYS = {"stop_reason", "store", "root", "parent", "max_model_len", "permission"}
OUR_KEYS |= {"kv_transfer_params", "prompt_logprobs", "prompt_token_ids", "token_ids"}  # null, as vLLM sends them
# Events of OpenAI's own API have these, or have had them; its schema does not.
OUR_KEYS_OF_EVENTS = {"response.function_call_arguments.done": {"name"}, "response.output_text.delta": {"bytes"}}
OUR_KEYS_OF_EVENTS["response.output_text.done"] = {"bytes"}


def sent(url: str, route: str, body: dict[str, Any]) -> list[Any]:
    request = urllib.request.Request(f"{url}/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    if not body.get("stream"):
        return [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def in_schema(value: Any, ours: frozenset[str] = frozenset(OUR_KEYS)) -> Any:
    """Without our own keys, and with the one that the client itself adds to each response."""
    if isinstance(value, list):
        return [in_schema(entry, ours) for entry in value]
    if not isinstance(value, dict):
        return value
    ours |= OUR_KEYS_OF_EVENTS.get(value.get("type", ""), set())
    if value.get("object") == "text_completion":
        ours |= {"service_tier"}
    fields = {name: in_schema(entry, ours) for name, entry in value.items() if name not in ours}
    if value.get("object") == "response":
        # OpenAI's own API says null for these two; its schema wants them left out.
        fields = {name: entry for name, entry in fields.items() if entry is not None or name not in ("usage", "user")}
        fields["output_text"] = ""
    return fields


def test_what_is_sent_has_the_types_of_openai_for_typescript(install: Install, place: list[Any]) -> None:
    """Those types come from OpenAI's schema and say, as it does, which nullable keys are required."""
    folder = install(with_npm, "openai@^7", "typescript@^5")
    url, model = place
    values = [("Models.Model", sent_model) for sent_model in sent_models(url)]
    for whole, event, route, body in EXCHANGES:
        values += [(whole, value) for value in sent(url, route, {"model": model, **body})]
        if event is not None:
            values += [(event, value) for value in sent(url, route, {"model": model, **body, "stream": True})]
    wrong = ("Completion", {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [{}]})
    assert len(type_errors(folder, [*values, wrong])) == 1
    assert type_errors(folder, values) == []


def sent_models(url: str) -> list[Any]:
    with urllib.request.urlopen(f"{url}/models", timeout=60) as response:
        return list(json.load(response)["data"])


def type_errors(folder: Path, values: list[tuple[str, Any]]) -> list[str]:
    """The compiler's complaints, each with the value it is about."""
    lines = ['import OpenAI from "openai";']
    lines += [f"export const v{k}: OpenAI.{kind} = {json.dumps(in_schema(v))};" for k, (kind, v) in enumerate(values)]
    (folder / "check.ts").write_text("\n".join(lines))
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "nodenext"]
    ran = run(["node", folder / "node_modules/typescript/bin/tsc", *flags, "check.ts"], folder)
    found = [line for line in ran.stdout.splitlines() if line.startswith("check.ts(")]
    assert bool(found) == bool(ran.returncode), ran.stdout + ran.stderr
    return [f"{line}: {lines[int(line.split('(')[1].split(',')[0]) - 1]}" for line in found]


def test_langchain(install: Install, place: list[object], tmp_path: Path) -> None:
    python = install(with_pip, "langchain-openai>=1,<2", "litellm>=1.80,<2") / "bin/python"
    said = json.loads(output_of([python, CLIENTS / "langchain_chat.py", *place], tmp_path))
    assert said["whole"]
    assert said["streamed"] == said["both"][0] == said["whole"]
    assert said["both"][1] != said["whole"]
    assert said["finish_reason"] == "length"
    assert said["num_chunks"] > 2  # how many depends on how fast it reads
    assert said["whole_usage"]["output_tokens"] == said["streamed_usage"]["output_tokens"] == 12


def test_litellm(install: Install, place: list[object], tmp_path: Path) -> None:
    python = install(with_pip, "langchain-openai>=1,<2", "litellm>=1.80,<2", client="litellm") / "bin/python"
    said = json.loads(output_of([python, CLIENTS / "litellm_calls.py", *place], tmp_path))
    assert said["whole"]
    assert said["streamed"] == said["whole"]
    assert said["streamed_usage"] == said["whole_usage"] > 10
    assert "".join(said["text_tokens"]) == said["text"]
    assert len(said["text_tokens"]) == 5
    assert said["num_dimensions"] > 0
    assert "`nobody` does not exist" in said["mistake"]


def test_ollama(install: Install, place: list[object], tmp_path: Path) -> None:
    python = install(with_pip, "ollama>=0.6,<1") / "bin/python"
    said = json.loads(output_of([python, CLIENTS / "ollama_calls.py", *place], tmp_path))
    assert said["models"] == said["running"] == ["llmstack-demo"]
    assert "completion" in said["capabilities"]
    assert said["whole"]
    assert said["streamed"] == said["prompt"] == said["whole"]
    assert said["num_parts"] > 2
    assert said["streamed_count"] == said["whole_count"] == 10
    assert said["raw"]
    assert said["formatted"].keys() == {"a"}
    assert said["num_vectors"] == 2
    assert said["mistake"].startswith("404")


def test_ollama_for_node(install: Install, place: list[object], tmp_path: Path) -> None:
    folder = install(with_npm, "ollama@^0.6")
    script = shutil.copy(CLIENTS / "ollama_node.mjs", folder)
    said = json.loads(output_of(["node", script, *place], tmp_path))
    assert said["models"] == said["running"] == ["llmstack-demo"]
    assert "completion" in said["capabilities"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", said["version"])
    assert said["whole"]
    assert said["streamed"] == said["prompt"] == said["whole"]
    assert said["numParts"] > 2
    assert said["streamedCount"] == said["wholeCount"] == 10
    assert said["raw"]
    assert said["formatted"].keys() == {"a"}
    assert said["numVectors"] == 2
    assert said["left"] > 0, "a stream can be left"
    assert said["mistake"].startswith("404")
    assert "`nobody` does not exist" in said["mistake"]


QUESTIONS: list[dict[str, Any]] = [
    {"question": "Once upon a", "choices": ["time there", "zqx of"], "answer": 0},
    {"question": "The fox ran into the", "choices": ["xylophone", "wood"], "answer": 1},
    {"question": "The old king had three", "choices": ["sons", "divisors of unity"], "answer": 0},
]
TASK = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: questions.jsonl}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


def expected_likelihoods(folder: Path) -> list[list[tuple[float, bool]]]:
    """For each question and choice: the log-likelihood by transformers, and whether it is what greedy decoding says."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def likelihood(context: str, continuation: str) -> tuple[float, bool]:
        token_ids = tokenizer(context + continuation)["input_ids"]
        num_context = len(tokenizer(context)["input_ids"])
        with torch.inference_mode():
            logprobs = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        rows, chosen = logprobs[num_context - 1 : -1], torch.tensor(token_ids[num_context:])
        total = rows.gather(1, chosen[:, None]).sum().item()
        return total, bool((rows.argmax(-1) == chosen).all())

    return [[likelihood(q["question"], " " + choice) for choice in q["choices"]] for q in QUESTIONS]


def test_lm_eval(install: Install, place: list[object], model_folder: Path, tmp_path: Path) -> None:
    python = install(with_pip_and_ours, "lm-eval[api]>=0.4.9,<0.5") / "bin/python"
    url, model = place
    (tmp_path / "choice.yaml").write_text(TASK)
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    arguments = f"model={model},base_url={url}/completions,tokenizer_backend=huggingface,tokenizer={model_folder}"
    output_of(
        [python, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments, "--tasks", "choice",
         "--include_path", tmp_path, "--log_samples", "--output_path", tmp_path / "out"],
        tmp_path,
    )  # fmt: skip
    (samples,) = tmp_path.glob("out/**/samples_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    for row, expected in zip(rows, expected_likelihoods(model_folder), strict=True):
        for ((likelihood, is_greedy),), (expected_likelihood, expected_greedy) in zip(
            row["resps"], expected, strict=True
        ):
            assert float(likelihood) == pytest.approx(expected_likelihood, abs=0.05)
            assert is_greedy == str(expected_greedy)
        best = max(range(len(expected)), key=lambda index: expected[index][0])
        assert row["acc"] == float(best == row["doc"]["answer"])


ANSWERED = """
task: answered
dataset_path: json
dataset_kwargs: {data_files: questions.jsonl}
test_split: train
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def test_lm_eval_of_chats(install: Install, place: list[Any], demo_server: Any, tmp_path: Path) -> None:
    python = install(with_pip_and_ours, "lm-eval[api]>=0.4.9,<0.5") / "bin/python"
    url, model = place
    (tmp_path / "answered.yaml").write_text(ANSWERED)
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    output_of(
        [python, "-m", "lm_eval", "--model", "local-chat-completions", "--apply_chat_template", "--tasks", "answered",
         "--model_args", f"model={model},base_url={url}/chat/completions", "--include_path", tmp_path, "--log_samples",
         "--output_path", tmp_path / "out"],
        tmp_path,
    )  # fmt: skip
    (samples,) = tmp_path.glob("out/**/samples_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    assert len(rows) == len(QUESTIONS)
    for row, question in zip(rows, QUESTIONS, strict=True):
        answer = demo_server.client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question["question"]}], max_tokens=12, temperature=0,
            stop=["\n"],
        )  # fmt: skip
        assert row["resps"] == [[answer.choices[0].message.content]]


def test_guidellm(install: Install, demo_server: Any, model_folder: Path, tmp_path: Path) -> None:
    python = install(with_pip_and_ours, "guidellm>=0.8,<0.9") / "bin/python"
    report = tmp_path / "report.json"
    output_of(
        [python, "-m", "guidellm", "run", "--disable-console",
         "--backend", f"kind=openai_http,target={demo_server.url},model=llmstack-demo",
         "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
         "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
         "--tokenizer", f"kind=hf_auto,model={model_folder}", "--output", f"kind=json,path={report}"],
        tmp_path,
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert metrics["output_token_count"]["successful"]["mean"] == 8.0
    assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0
    assert all(request["output"] for request in benchmark["requests"]["successful"])
