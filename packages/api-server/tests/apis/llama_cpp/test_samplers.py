"""`samplers` of `/infill`: which chains are the same as ours, and what they turn off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from server_helpers.gaps import GAP_TOKENS, front_end

from llmstack_server.apis.llama_cpp.samplers import sampler_fields
from llmstack_server.app import build_app
from llmstack_server.testing import call, ready_state
from llmstack_types import InvalidRequestError

# Requests as the editors send them, shortened: llama.vim, llama.vscode.
VIM = {
    "id_slot": 0, "input_prefix": "def f(x):\n", "input_suffix": "\n", "input_extra": [], "prompt": "    return",
    "n_predict": 3, "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.90, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
}  # fmt: skip
VSCODE = {
    "input_prefix": "def f(x):\n", "input_suffix": "\n", "input_extra": [], "prompt": "    return", "n_predict": 3,
    "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 2500,
}  # fmt: skip


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Any]:
    async with front_end(tmp_path / "m", list(GAP_TOKENS)) as (llm, client):
        yield build_app(ready_state(llm, ready=client.ready)), llm, client


@pytest.mark.parametrize("body", [VIM, VSCODE], ids=["llama.vim", "llama.vscode"])
async def test_the_requests_of_editors_are_answered(served: Any, body: dict[str, Any]) -> None:
    app, llm, client = served
    client.engine.output_token_ids = llm.tokenizer.encode(" x+")
    answer = await call(app, "POST", "/infill", body)
    assert (answer.status, answer.json()["content"]) == (200, " x+")
    params = client.added[-1].sampling_params
    assert (params.infill, params.top_k, params.top_p) == (True, 40, body["top_p"])
    assert (params.temperature, params.min_p, params.typical_p, params.presence_penalty) == (1.0, 0.0, 1.0, 0.0)


async def test_what_a_chain_leaves_out_is_off_whatever_its_field_says(served: Any) -> None:
    app, _, client = served
    fields = {"temperature": 0.2, "min_p": 0.3, "presence_penalty": 1.0, "repetition_penalty": 1.3, "top_n_sigma": 1.0}
    answer = await call(app, "POST", "/infill", {**VSCODE, **fields})
    assert answer.status == 200, answer.body
    params = client.added[-1].sampling_params
    assert (params.temperature, params.min_p, params.repetition_penalty, params.top_n_sigma) == (1.0, 0.0, 1.0, -1.0)
    assert (await call(app, "POST", "/infill", {**VSCODE, "samplers": []})).status == 200
    params = client.added[-1].sampling_params
    assert (params.infill, params.top_k, params.top_p) == (False, 0, 1.0)


async def test_infill_needs_few_candidates_and_the_bytes_of_tokens(served: Any) -> None:
    app, llm, client = served
    error = (await call(app, "POST", "/infill", {**VSCODE, "top_k": 257})).json()["error"]
    assert (error["param"], error["message"]) == (
        "top_k", "Invalid 'top_k': with the sampler 'infill' it must be from 1 to 256."
    )  # fmt: skip
    llm.tokenizer.token_bytes = None
    llm.input_processor.set_ready(client.ready)
    error = (await call(app, "POST", "/infill", VSCODE)).json()["error"]
    assert error["param"] == "samplers"
    assert "needs the bytes of tokens" in error["message"]


ALL = {"temperature": 0.7, "min_p": 0.1, "typical_p": 0.9, "top_k": 5, "top_p": 0.9, "top_n_sigma": 1.0,
       "presence_penalty": 0.1}  # fmt: skip
OURS = ["penalties", "top_n_sigma", "temperature", "min_p", "typ_p", "top_k", "top_p", "infill"]


@pytest.mark.parametrize(
    ("chain", "values"),
    [
        (OURS, ALL),
        (["dry", *OURS, "xtc", "adaptive_p"], ALL),
        ("estmykpi", ALL),
        (["top_k", "temperature"], ALL),
        (["top_k", "min_p"], ALL),
        (["temperature", "top_n_sigma", "top_k"], ALL),
        (["top_n_sigma", "top_k", "top_p", "temperature"], {**ALL, "temperature": 0.0}),
        # That of llama.cpp itself, with values of which two others would disagree.
        ("edskypmxt", {"top_k": 40, "top_p": 0.95, "temperature": 1.0}),
        ("edskypmxt", {"top_k": 40, "min_p": 0.05, "temperature": 1.0}),
        ("edskypmxt", {"top_k": 40, "temperature": 0.8}),
        (["infill", "top_k"], {"top_k": 0}),
    ],
)  # fmt: skip
def test_a_chain_with_the_same_effect_is_accepted(chain: list[str] | str, values: dict[str, Any]) -> None:
    fields = sampler_fields(chain, values)
    assert fields["infill"] == ("infill" in chain or "i" in chain)


@pytest.mark.parametrize(
    ("chain", "values", "message"),
    [
        (["infill", "top_k"], ALL, "'top_k' comes before 'infill' here"),
        (["top_p", "top_k"], ALL, "'top_k' comes before 'top_p' here"),
        (["top_p", "min_p"], ALL, "'min_p' comes before 'top_p' here"),
        (["top_p", "temperature"], ALL, "'temperature' comes before 'top_p' here"),
        (["typ_p", "temperature"], {**ALL, "temperature": 0.0}, "'temperature' comes before 'typ_p' here"),
        (["infill", "temperature"], {**ALL, "temperature": 0.0}, "'temperature' comes before 'infill' here"),
        (["top_k", "penalties"], ALL, "'penalties' comes before 'top_k' here"),
        (["top_k", "top_n_sigma"], ALL, "'top_n_sigma' comes before 'top_k' here"),
        ("edskypmxt", ALL, "'typ_p' comes before 'top_k' here"),
        (["mirostat"], ALL, "'mirostat' is none of penalties"),
        ("kz", ALL, "'z' is none of penalties"),
        (["top_k", "top_k"], ALL, "'top_k' occurs twice"),
    ],
)
def test_another_order_with_another_effect_is_refused(
    chain: list[str] | str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sampler_fields(chain, values)
    assert caught.value.param == "samplers"
    assert message in caught.value.message
