"""Frameworks that people build on the OpenAI API, unmodified, against a real server that makes tool calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_environments import CLIENTS, Install, output_of, run, said_by, with_npm, with_pip

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

LEAST_WHITESPACE = '{"disable_any_whitespace": true}'  # a small model may write spaces until its tokens are used up


@pytest.fixture(scope="module")
def place(serve: Callable[..., Any]) -> Iterator[list[str]]:
    """URL and model, as the scripts take them."""
    with serve(
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--structured-outputs-config", LEAST_WHITESPACE
    ) as server:
        yield [server.url + "/v1", "llmstack-demo"]


def run_script(install: Install, script: str, place: list[str], folder: Path, *requirements: str) -> Any:
    """What a script of `clients` says, run in an environment with these requirements."""
    python = install(with_pip, *requirements) / "bin/python"
    return said_by([python, CLIENTS / script, *place], folder)


def test_instructor_in_each_of_its_modes(install: Install, place: list[str], tmp_path: Path) -> None:
    modes = ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS", "PARALLEL_TOOLS", "JSON", "MD_JSON"]
    said = run_script(install, "instructor_modes.py", [*place, *modes], tmp_path, "instructor>=1.17,<2")
    assert [said[mode] for mode in modes[:3]] == ["Animal"] * 3
    # In these the model is free to write something else. The demo model does, and Instructor says so.
    assert all(said[mode].startswith(("IncompleteOutput", "InstructorRetry")) for mode in modes[3:]), said
    assert not any("Error code" in said[mode] for mode in modes)


def test_guidance_select_and_pattern(install: Install, place: list[str], tmp_path: Path) -> None:
    said = run_script(install, "guidance_grammar.py", place, tmp_path, "guidance>=0.3.1,<0.4", "openai")
    assert said["choice"] in ("yes", "no")
    assert 1 <= int(said["age"]) <= 99


def test_outlines_types_and_stream(install: Install, place: list[str], tmp_path: Path) -> None:
    said = run_script(install, "outlines_types.py", place, tmp_path, "outlines>=1.3,<2", "openai")
    assert said["text"] == "".join(said["pieces"]) != ""
    assert said["choice"] in ("red", "blue")
    assert len(said["pattern"]) == 3
    assert said["pattern"].isdigit()
    assert isinstance(json.loads(said["object"])["is_small"], bool)
    assert said["grammar"] in ("a", "b")


def test_dspy_prediction_of_a_schema(install: Install, place: list[str], tmp_path: Path) -> None:
    said = run_script(install, "dspy_predict.py", place, tmp_path, "dspy>=3.4,<4")
    assert isinstance(said["is_small"], bool)
    assert said["colour"] in ("red", "grey")
    assert said["text"]


def test_llama_index_chat_completion_and_tool(install: Install, place: list[str], tmp_path: Path) -> None:
    said = run_script(install, "llama_index_chat.py", place, tmp_path, "llama-index-llms-openai-like>=0.8,<0.9")
    assert said["chat"] == said["chat_streamed"] != ""
    assert said["text"] == said["text_streamed"] != ""
    ((name, arguments),) = said["calls"]
    assert name == "look"
    assert isinstance(arguments["deep"], bool)


def test_haystack_chat_stream_and_schema(install: Install, place: list[str], tmp_path: Path) -> None:
    said = run_script(install, "haystack_chat.py", place, tmp_path, "haystack-ai>=3.4,<4")
    assert said["whole"] == said["streamed"] == said["pieces"] != ""
    assert said["usage"] == 12
    assert isinstance(said["object"]["small"], bool)


def test_pydantic_ai_text_tool_and_native_output(install: Install, place: list[str], tmp_path: Path) -> None:
    said = run_script(install, "pydantic_ai_agents.py", place, tmp_path, "pydantic-ai-slim[openai]>=2.68,<3")
    for api in ("chat", "responses"):
        whole, streamed, num_tokens = said[f"{api}: text"]
        assert whole == streamed != ""
        assert num_tokens == 20
        assert isinstance(said[f"{api}: ToolOutput"], bool)
        assert isinstance(said[f"{api}: NativeOutput"], bool)


def test_agents_sdk_tools_of_chats_and_responses(install: Install, place: list[str], tmp_path: Path) -> None:
    said = run_script(install, "agents_sdk.py", place, tmp_path, "openai-agents>=0.24,<0.25")
    for num_looks, whole, streamed, num_events in said.values():
        assert (num_looks, whole, streamed) == (2, "a wood", "a wood")
        assert num_events > 2


def test_inspect_task_and_scores(install: Install, place: list[str], tmp_path: Path) -> None:
    said = run_script(install, "inspect_task.py", place, tmp_path, "inspect_ai>=0.3.285,<0.4", "openai")
    assert said["status"] == "success"
    assert len(said["texts"]) == 2
    assert all(said["texts"])
    assert said["scores"][1] == "I"
    assert 0 < said["num_tokens"] <= 60


def test_llm_command_whole_and_streamed(install: Install, place: list[str], tmp_path: Path) -> None:
    command = install(with_pip, "llm>=0.36,<0.37") / "bin/llm"
    url, model = place
    (tmp_path / "llm_user_path").mkdir()
    (tmp_path / "llm_user_path" / "extra-openai-models.yaml").write_text(
        json.dumps(
            [
                {"model_id": "demo", "model_name": model, "api_base": url, "api_key": "none"},
                {"model_id": "text", "model_name": model, "api_base": url, "api_key": "none", "completion": True},
            ]
        )
    )
    options = ["-o", "max_tokens", "12", "-o", "temperature", "0"]
    whole = output_of([command, "-m", "demo", "--no-stream", *options, "Tell me about a fox."], tmp_path)
    assert whole.strip()
    assert output_of([command, "-m", "demo", *options, "Tell me about a fox."], tmp_path) == whole
    assert output_of([command, "-m", "text", *options, "Once upon a time"], tmp_path).strip()


def test_vercel_ai_text_object_and_tool(install: Install, place: list[str], tmp_path: Path) -> None:
    folder = install(with_npm, "ai@^6", "@ai-sdk/openai-compatible@^2", "@ai-sdk/openai@^3", "zod@^4")
    said = said_by(["node", shutil.copy(CLIENTS / "vercel_ai.mjs", folder), *place], tmp_path)
    for api in ("chats", "responses"):
        assert said[api]["whole"] == said[api]["streamed"] != ""
        assert said[api]["usage"] == [16, 16]
        assert said[api]["finishReason"] == "length"
        assert isinstance(said[api]["object"]["small"], bool)
        assert said[api]["calls"][0] == ["look", "boolean"]


def test_promptfoo_evaluation(install: Install, place: list[str], tmp_path: Path) -> None:
    folder = install(with_npm, "promptfoo@^0")
    url, model = place
    settings = {"apiBaseUrl": url, "apiKey": "none", "temperature": 0, "max_tokens": 12}
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "prompts": ["Tell me about a {{animal}}."],
                "providers": [{"id": f"openai:chat:{model}", "config": settings}],
                "tests": [
                    {"vars": {"animal": "fox"}, "assert": [{"type": "regex", "value": "[a-z]"}]},
                    {"vars": {"animal": "crow"}, "assert": [{"type": "is-json"}]},
                ],
            }
        )
    )
    run([folder / "node_modules/.bin/promptfoo", "eval", "--no-cache", "-c", "config.json", "-o", "out.json"], tmp_path)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert results["stats"]["errors"] == 0
    assert (results["stats"]["successes"], results["stats"]["failures"]) == (1, 1)
    assert results["stats"]["tokenUsage"]["completion"] == 24


def test_aiperf_profile(install: Install, place: list[str], tmp_path: Path) -> None:
    from llmstack_demo_model import model_path

    folder = install(with_pip, "aiperf>=0.13,<0.14")
    url, model = place
    output_of(
        [folder / "bin/aiperf", "profile", "-m", model, "--url", url.removesuffix("/v1"), "--endpoint-type", "chat",
         "--streaming", "--tokenizer", model_path(), "--request-count", "6", "--concurrency", "2",
         "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8", "--ui", "none"],
        tmp_path,
        HF_HUB_OFFLINE="",  # offline, it takes the path of a tokenizer for a name of the hub
    )  # fmt: skip
    (report,) = tmp_path.glob("artifacts/*/profile_export_aiperf.json")
    measured = json.loads(report.read_text())
    assert measured["request_count"]["avg"] == 6
    assert measured["time_to_first_token"]["min"] > 0
