"""Each field of other servers' requests is done, refused by name, or without effect for a reason that the docs give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import FakeEngineClient, call, ready_state

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from make_fields_page import ROUTES, SERVERS, verdict  # noqa: E402 (a tool is no package)

FIELDS = [
    pytest.param(route, fields, id=f"{server['engine']}{route}")
    for server in SERVERS
    for route, fields in server["routes"].items()
]
HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/chat/completions/batch": {"messages": [HELLO], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/embeddings": {"input": "Hi"},
    "/v2/embed": {"texts": ["Hi"], "input_type": "search_query"},
    "/pooling": {"input": "Hi", "task": "embed"},
    "/classify": {"input": "Hi"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
}
GAP_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
SAMPLES: tuple[Any, ...] = (True, "something", 7, {"a": {}}, [1], ["something"], False)


def app(num_labels: int = 0) -> Any:
    engine = FakeEngineClient(num_labels=num_labels, token_names=GAP_TOKENS)
    return build_app(ready_state(engine, HTTPConfig(is_strict_params=True)))


@pytest.mark.parametrize(("route", "fields"), FIELDS)
async def test_no_field_is_unknown_and_refused_ones_are_named(route: str, fields: dict[str, str]) -> None:
    server = app(num_labels=2 if route == "/classify" else 0)
    plain = await call(server, "POST", route, BODIES[route])
    assert plain.status == 200, plain.body
    for name in fields:
        if verdict(route, name).startswith("ignored"):
            answer = await call(server, "POST", route, {**BODIES[route], name: 1})
            assert answer.status == 400, (name, answer.body)
            assert f"Unknown parameter: '{name}'" in answer.json()["error"]["message"]
        elif name not in BODIES[route]:
            answer = await call(server, "POST", route, {**BODIES[route], name: None})
            assert answer.status == 200, (name, answer.body)
        value = effective_value(route, name)
        if value is not None:
            answer = await call(server, "POST", route, {**BODIES[route], name: value})
            error = answer.json()["error"]
            found = (answer.status, error.get("param", name), error.get("code", "unsupported_parameter"))
            assert found == (400, name, "unsupported_parameter"), answer.body


@pytest.mark.parametrize(
    "body",
    [
        {"dry_multiplier": 0.8, "dry_base": 1.75},
        {"dry_base": 2.5},
        {"dry_allowed_length": 4},
        {"dry_sequence_breakers": ["x"]},
        {"dry_penalty_last_n": 500},
        {"xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"xtc_threshold": 0.2},
        {"stop_regex": "a+"},
        {"mirostat": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_samplers_of_other_servers_are_refused_by_name(route: str, body: dict[str, Any]) -> None:
    answer = await call(app(), "POST", route, {**BODIES[route], **body})
    error = answer.json()["error"]
    assert (answer.status, next(iter(body))) == (400, error.get("param", next(iter(body)))), answer.body
    assert error.get("code", "unsupported_parameter") == "unsupported_parameter"


async def test_defaults_of_llama_cpp_that_change_nothing_are_accepted() -> None:
    defaults = {
        "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["\n", ":", '"', "*"], "xtc_probability": 0.0, "xtc_threshold": 0.1, "mirostat": 0,
        "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "grammar": "",
    }  # fmt: skip
    answer = await call(app(), "POST", "/v1/chat/completions", {**BODIES["/v1/chat/completions"], **defaults})
    assert answer.status == 200, answer.body


def effective_value(route: str, name: str) -> Any:
    """A value of the field's type that asks for what is not there; None where the field is not refused."""
    if not verdict(route, name).startswith("refused"):
        return None
    model, table = ROUTES[route]
    for value in SAMPLES:
        if is_of_type(model, name, value) and not table[name](value):
            return value
    assert name == "return_mm_kwargs", f"no sample is refused for {name}"
    return None


def is_of_type(model: type[BaseModel], name: str, value: Any) -> bool:
    try:
        model.model_validate({name: value})
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "extreme"}),
        ("/v1/chat/completions", {"service_tier": "gold"}),
        ("/v1/chat/completions", {"verbosity": "loud"}),
        ("/v1/completions", {"service_tier": "gold"}),
        ("/v1/responses", {"service_tier": "gold"}),
        ("/v1/responses", {"truncation": "some"}),
        ("/v1/responses", {"reasoning": {"effort": "extreme"}}),
        ("/v1/responses", {"reasoning": {"summary": "long"}}),
        ("/v1/responses", {"text": {"verbosity": "loud"}}),
        ("/v1/messages", {"service_tier": "gold"}),
        ("/v1/messages", {"output_config": {"effort": "extreme"}}),
    ],
    ids=str,
)
async def test_words_that_no_api_defines_are_invalid_values(route: str, field: dict[str, Any]) -> None:
    answer = await call(app(), "POST", route, {**BODIES[route], **field})
    error = answer.json()["error"]
    name, value = next(iter(field.items()))
    while isinstance(value, dict):
        key, value = next(iter(value.items()))
        name += f".{key}"
    assert (answer.status, error.get("param", name)) == (400, name), answer.body
    assert "expected one of" in error["message"]


def test_the_check_finds_a_field_without_a_decision() -> None:
    with pytest.raises(KeyError):
        verdict("/v1/chat/completions", "brand_new_field")


def test_the_page_is_written_from_the_tables() -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_fields_page.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
