"""A served model with states: hits in a chat, and an engine core that is killed in the middle of an answer."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from server_calls import post

import llmstack_demo_model

TOKENIZER = Path(llmstack_demo_model.__file__).parent / "model"
PROMPT = list(range(300, 345))


def write_checkpoint(folder: Path, seed: int) -> Path:
    """Random weights of a small LFM2, with the demo model's tokenizer."""
    folder.mkdir(exist_ok=True)
    vocab_size = json.loads((TOKENIZER / "config.json").read_text())["vocab_size"]
    torch.manual_seed(seed)
    config = transformers.Lfm2Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=96, block_multiple_of=8, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, layer_types=["conv", "conv", "full_attention", "conv"],
        max_position_embeddings=1024, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    transformers.Lfm2ForCausalLM(config).save_pretrained(folder)
    for path in TOKENIZER.glob("token*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = write_checkpoint(tmp_path_factory.mktemp("lfm2"), 3)
    with serve(str(folder), "--served-model-name", "states", "--dtype", "float32") as served:
        yield served


def test_the_second_turn_of_a_chat_finds_the_state_of_the_first(server: Any) -> None:
    messages = [{"role": "user", "content": "Tell me of the fox who lived beside the sea, and of his seven brothers."}]
    usages = []
    for _ in range(2):
        body = {"model": "states", "messages": messages, "max_tokens": 24, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        usages.append(answer["usage"])
        content = answer["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "And then?"}]
    assert usages[0]["prompt_tokens_details"]["cached_tokens"] == 0
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert server.metric("llmstack:prefix_tokens_without_state_total") >= 0


def test_an_answer_goes_on_to_the_same_tokens_after_a_killed_engine_core(server: Any) -> None:
    body = {
        "model": "states", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["token_ids"]
    streamed: list[int] = []
    is_killed = False
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                streamed += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"] or []
                if len(streamed) >= 60 and not is_killed:  # a step of drafts adds several
                    os.kill(server.engine_pid(), signal.SIGKILL)
                    is_killed = True
    assert streamed == whole
    assert len(whole) == 400
    assert server.get_json("/server_info")["processes"]["num_engine_restarts"] == 1


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_engine_cores_reload_and_sleep_and_never_answer_from_another_models_states(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    """The same prompts again and again: each answer is that of the weights of the time, from a hit or not."""
    first, other = (write_checkpoint(tmp_path / name, seed) for name, seed in (("first", 3), ("other", 4)))
    options = ["-dp", "2", "--enable-control-routes", "--enable-sleep-mode", "--reload-models", f"other={other}"]
    with serve(str(first), "--served-model-name", "states", "--dtype", "float32", *options) as served:

        def answers() -> list[list[int]]:
            found = []
            for number in range(6):  # of both engine cores
                body = {
                    "model": "states", "prompt": [number + 1, *PROMPT], "max_tokens": 24, "temperature": 0,
                    "ignore_eos": True, "return_token_ids": True,
                }  # fmt: skip
                status, answer, _ = served.post("/v1/completions", body)
                assert status == 200, answer
                found.append(answer["choices"][0]["token_ids"])
            return found

        before = answers()
        assert answers() == before
        assert served.metric("llmstack:prefix_cache_hits_total") > 0
        assert served.post("/v1/reload", {"name": "other"})[0] == 200
        reloaded = answers()
        assert reloaded != before
        assert answers() == reloaded
        served.wait_for(lambda: len(served.engine_pids()) == 2, "the engine cores of now")
        assert served.post("/v1/reload", {"name": "start"})[0] == 200
        assert answers() == before
        for level in (1, 2):
            assert served.get_json("/server_info")["engines"][0]["num_state_blocks"] > 0
            assert post(served, f"/sleep?level={level}") == 200
            assert post(served, "/wake_up") == 200
            assert answers() == before
