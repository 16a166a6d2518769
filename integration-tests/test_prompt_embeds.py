"""Prompts as vectors: the text of the same prompt as token ids, whatever happens to the request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save

from llmstack_demo_model import model_path
from llmstack_engine_core.messages.protocol import CLIENT_MESSAGES
from llmstack_llm import LLM, SamplingParams
from llmstack_step_log import read_step_log
from llmstack_step_log.replay.verify import verify
from llmstack_types import Control

PROMPTS = ["Once upon a time there was a small fox who", "The old king said to the"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
# Chunks of four tokens, and a cache so small that one request has to make room for the other.
OPTIONS: dict[str, Any] = {
    "enable_prompt_embeds": True, "max_num_batched_tokens": 4, "max_num_seqs": 2, "block_size": 8, "num_kv_blocks": 4,
    "max_model_len": 28, "generation_config": "vllm",
}  # fmt: skip


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "steps"


@pytest.fixture(scope="module")
def llm(log: Path) -> Iterator[LLM]:
    with LLM(str(model_path()), record_steps=str(log), **OPTIONS) as made:
        yield made


def table() -> Any:
    return load_file(Path(model_path()) / "model.safetensors")["transformer.wte.weight"]


def ids_of(llm: LLM) -> list[list[int]]:
    return [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]


def generate(llm: LLM, prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def vectors(token_ids: list[int]) -> dict[str, bytes]:
    return {"prompt_embeds": save({"prompt_embeds": table()[token_ids]})}


def generate_rest(llm: LLM, prompt: dict[str, bytes], output_token_ids: list[int]) -> list[int]:
    """What an engine core computes that takes the place of one that died after these tokens."""
    processor, client = llm.llm_engine.input_processor, llm.llm_engine.client
    (request,) = processor.process_inputs("again", processor.admit(prompt, processor.check_params(GREEDY)))
    frame = CLIENT_MESSAGES.encode(replace(request, output_token_ids=tuple(output_token_ids)))
    client.add_request(CLIENT_MESSAGES.decode(frame)[1])
    found: list[int] = []
    while len(output_token_ids) + len(found) < 12:
        for output in client.get_outputs().outputs:
            found += output.new_token_ids
    return found


def test_vectors_of_tokens_give_the_tokens_that_these_give(llm: LLM, log: Path) -> None:
    ids = ids_of(llm)
    expected = generate(llm, ids)
    assert expected[0] != expected[1]
    given = [vectors(one) for one in ids]
    assert generate(llm, given) == expected
    outputs = llm.generate(given, GREEDY, use_tqdm=False)  # equal vectors again: nothing of them is found in the cache
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    two = SamplingParams(temperature=0.0, max_tokens=6, n=2)
    assert generate(llm, given[0], two) == [expected[0][:6]] * 2
    assert generate(llm, [vectors(ids[0][:1])]) == generate(llm, [ids[0][:1]])
    assert generate_rest(llm, given[0], expected[0][:5]) == expected[0][5:]
    assert llm.llm_engine.client.call(Control.STATS).num_preemptions > 0
    llm.close()
    verify(read_step_log(log))
    assert given[0]["prompt_embeds"][-64:] not in log.read_bytes()
